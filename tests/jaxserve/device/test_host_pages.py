"""Pages come back from host memory bit by bit, whatever they are made of and in whichever order they move."""

from typing import Any

import jax
import numpy as np
import pytest
from tiny_engine import NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, tiny_config

from jaxserve.device.host_pages import HostPages
from jaxserve.device.programs import compile_programs
from jaxserve.device.sharding import tensor_mesh
from jaxserve.scheduling.host_tier import COPY_PAGES, MOST_ON_THE_WAY, Copies
from jaxserve.startup.loading import program_spec
from models.step import KVPool
from pallas_kernels.kv_dtype import KVDtype

pytestmark = pytest.mark.usefixtures("compiled_quickly")

# More than can be on the way at once, and one that fits no call.
MANY = MOST_ON_THE_WAY * COPY_PAGES[-1] + 3
NUM_PAGES = 1 + MANY


def bits(kv: KVPool) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(kv)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_saved_pages_come_back_bit_by_bit_to_other_places(dtype: KVDtype) -> None:
    config = tiny_config(TinyOptions(num_pages=NUM_PAGES, host_pages=MANY, cache_dtype=dtype))
    spec = program_spec(config, TINY_MODEL, NUM_TOKEN_IDS, tensor_mesh(1, jax.devices()))
    programs = compile_programs(spec, lambda done, total: None, shapes=())
    rng = np.random.default_rng(1)

    def random(zeros: jax.Array) -> jax.Array:
        return jax.device_put((rng.standard_normal(zeros.shape) * 100).astype(zeros.dtype), zeros.sharding)

    kv = jax.tree.map(random, programs.new_state().kv)
    before = bits(kv)
    host = HostPages(spec, programs, MANY)
    pages = rng.permutation(np.arange(1, NUM_PAGES)).tolist()

    # All go out, and come back in reverse.
    kv = host.copy(Copies(saved=tuple((page, page - 1) for page in pages), restored=()), kv)
    kv = host.copy(Copies(saved=(), restored=tuple((page - 1, NUM_PAGES - page) for page in pages)), kv)
    for old, new in zip(before, bits(kv), strict=True):
        assert np.array_equal(old[1:], new[:0:-1])
        assert np.array_equal(old[0], new[0]), "the dummy page is as it was"

    # A page that is saved and wanted back within one call, while its own place is taken by another.
    kv = host.copy(Copies(saved=((1, 0), (2, 1)), restored=((0, 2), (5, 1))), kv)
    for old, new in zip(before, bits(kv), strict=True):
        assert np.array_equal(new[2], old[MANY]), "page 1 held what page MANY had held"
        assert np.array_equal(new[1], old[6])
