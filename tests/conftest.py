"""What all tests share: hypothesis without deadlines (the machine may be busy), the tiny engine, the embedded model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from quick_compilation import quick_compilation
from tiny_engine import build_tiny_engine

from jaxserve.engine import Engine
from jaxserve.llm import LLM

EMBEDDED_CONFIG: dict[str, Any] = {
    "model": {"path": "smollm2-135m", "max_model_len": 256},
    "cache": {"num_pages": 65},
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 68},
    "execution": {"decode_buckets": [4], "prefill_buckets": [2]},
}

settings.register_profile("jaxserve", deadline=None, derandomize=True)
settings.load_profile("jaxserve")


@pytest.fixture(scope="session", autouse=True)
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What one server compiles is there for the next, in whichever process; nothing is left for another run."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "jaxserve" / "programs"


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """For `usefixtures` of a module whose programs run once or twice."""
    with quick_compilation():
        yield


@pytest.fixture(scope="session")
def tiny_engine() -> Callable[..., Engine]:
    """Called with `TinyOptions` as keywords: a new engine each time, compiled once for all tests."""
    return build_tiny_engine


@pytest.fixture(scope="session")
def embedded_llm() -> LLM:
    """The embedded model with few and small programs: compiling them takes most of the time."""
    return LLM(**EMBEDDED_CONFIG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: a mistake shows before the slow ones have begun. A file's fast tests run in one process, and so
    do its slow ones, for what they share is built once a process."""

    def is_slow(item: pytest.Item) -> bool:
        return item.get_closest_marker("slow") is not None

    items.sort(key=is_slow)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{'slow' if is_slow(item) else 'fast'}"))
