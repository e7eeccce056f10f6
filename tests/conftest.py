"""What all tests share: hypothesis without deadlines (the machine may be busy), and the tiny engine."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from tiny_engine import build_tiny_engine

from jaxserve.engine import Engine

settings.register_profile("jaxserve", deadline=None, derandomize=True)
settings.load_profile("jaxserve")


@pytest.fixture(scope="session")
def tiny_engine() -> Callable[..., Engine]:
    """Called with `TinyOptions` as keywords: a new engine each time, compiled once for all tests."""
    return build_tiny_engine
