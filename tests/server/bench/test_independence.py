"""The load generator measures any server, so it leans on none: not on ours, nor on packages that only ours needs."""

import ast
import sys
from pathlib import Path

import server.bench

ALLOWED = {"h11", "numpy", "pydantic", "rich"}


def test_the_load_generator_imports_nothing_of_the_engine() -> None:
    sources = sorted(Path(server.bench.__path__[0]).glob("*.py"))
    assert len(sources) > 10
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            for name in names:
                top = name.split(".")[0]
                assert top in ALLOWED or top in sys.stdlib_module_names or name.startswith("server.bench"), source.name
