"""The `jaxserve` command's first lines: imports everything else with the collector off; knows no flag."""

import gc
from importlib import import_module
from typing import NoReturn


def main() -> NoReturn:
    """Runs `server.cli.main.main`.

    Importing makes hundreds of thousands of objects that stay; looking through them again and again while they come
    took a fifth of the time.
    """
    gc.disable()
    cli = import_module("server.cli.main")
    gc.freeze()
    gc.enable()
    cli.main()
    raise AssertionError("server.cli.main.main leaves by itself")


if __name__ == "__main__":
    main()
