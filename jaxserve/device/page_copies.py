"""The functions that take pages out of the pool and put them back, whatever arrays the pool is made of; owns no state.

One call moves a few pages of all layers. Arrays of one shape and dtype travel as one, since each array that crosses to
the host has a price of its own.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from models.step import KVPool


def gather_pages(kv: KVPool, page_ids: Array) -> list[Array]:
    """Copies of pages, to be sent to the host.

    Args:
      page_ids: int32[pages]; page 0 for padding.

    Returns:
      One array [pages, arrays of the kind, …] for each kind of array that the pool has.
    """
    leaves = jax.tree.leaves(kv)
    return [jnp.stack([leaves[i][page_ids] for i in kind], axis=1) for kind in _kinds(leaves)]


def scatter_pages(kv: KVPool, page_ids: Array, copies: Sequence[Array]) -> KVPool:
    """The pool with pages as `gather_pages` took them.

    Args:
      kv: updated in place where the caller donates it.
      page_ids: int32[pages]; a page that is named twice gets the same contents twice.
    """
    leaves, structure = jax.tree.flatten(kv)
    kinds = _kinds(leaves)

    # Page by page: for one scatter XLA on CPU would copy a bfloat16 pool (jax 0.10).
    def put(row: Array, leaves: list[Array]) -> list[Array]:
        leaves = list(leaves)
        for kind, copy in zip(kinds, copies, strict=True):
            for number, i in enumerate(kind):
                leaves[i] = jax.lax.dynamic_update_index_in_dim(leaves[i], copy[row, number], page_ids[row], axis=0)
        return leaves

    updated: KVPool = jax.tree.unflatten(structure, jax.lax.fori_loop(0, page_ids.shape[0], put, leaves))
    return updated


def copy_structs(kv: KVPool, num_pages: int) -> list[jax.ShapeDtypeStruct]:
    """What `gather_pages` returns for so many pages of a pool of shapes with shardings: heads stay where they are."""
    leaves = jax.tree.leaves(kv)
    structs = []
    for kind in _kinds(leaves):
        leaf = leaves[kind[0]]
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
        structs.append(jax.ShapeDtypeStruct((num_pages, len(kind), *leaf.shape[1:]), leaf.dtype, sharding=sharding))
    return structs


def _kinds(leaves: Sequence[Array]) -> list[list[int]]:
    """The indices of arrays that differ in nothing but their contents."""
    kinds: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for i, leaf in enumerate(leaves):
        kinds.setdefault((leaf.shape[1:], str(leaf.dtype)), []).append(i)
    return list(kinds.values())
