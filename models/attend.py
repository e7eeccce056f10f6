"""A layer's attention over a whole step: new keys and values into their pages, then both regions; on a mesh by head."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from models.hadamard import turn
from models.step import StepBatch
from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.kv_format import KVPages
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import Backend, paged_attention

# Formats of so few digits that keys, or values, are turned first. fp8_e5m2 serves values better as they are.
TURNED_KEYS: tuple[KVDtype, ...] = ("int4", "fp8_e5m2")
TURNED_VALUES: tuple[KVDtype, ...] = ("int4",)


def attend(
    q: Array,
    k: Array,
    v: Array,
    kv_pages: KVPages,
    batch: StepBatch,
    *,
    scale: float,
    sliding_window: int | None,
    backend: Backend,
    mesh: Mesh | None,
) -> tuple[Array, KVPages]:
    """Writes the step's keys and values, then attends to all that its rows may see.

    Heads are independent, so on a mesh every device runs the kernels over its own heads and its own pages
    (`shard_map`), and nothing travels.

    Args:
      q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
      kv_pages: the layer's.
      mesh: of one axis, whose size divides heads and kv_heads; None: one device.

    Returns:
      [tokens, heads * head_dim], q's dtype, and the updated pages.
    """
    run = partial(_attend, scale=scale, sliding_window=sliding_window, backend=backend)
    if mesh is not None and mesh.size > 1:
        by_head = PartitionSpec(None, *mesh.axis_names)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(by_head, by_head, by_head, by_head, PartitionSpec()),
            out_specs=(by_head, by_head),
            check_vma=False,  # kernels do not say how their outputs vary
        )
    out: tuple[Array, KVPages] = run(q, k, v, kv_pages, batch)
    return out


def _attend(
    q: Array,
    k: Array,
    v: Array,
    kv_pages: KVPages,
    batch: StepBatch,
    *,
    scale: float,
    sliding_window: int | None,
    backend: Backend,
) -> tuple[Array, KVPages]:
    if kv_pages.dtype in TURNED_KEYS:
        q, k = turn(q), turn(k)
    if kv_pages.dtype in TURNED_VALUES:
        v = turn(v)
    kv_pages = write_kv(kv_pages, k, v, batch.page_ids, batch.offsets, backend=backend)
    attention = partial(
        paged_attention,
        kv=kv_pages,
        block_tables=batch.block_tables,
        scale=scale,
        sliding_window=sliding_window,
        backend=backend,
    )
    tokens, num_decode, num_blocks = q.shape[0], batch.decode.lengths.shape[0], batch.prefill.lengths.shape[0]
    regions = []
    if num_decode:
        regions.append(attention(q[:num_decode, None], rows=batch.decode)[:, 0])
    if num_blocks:
        blocks = q[num_decode:].reshape(num_blocks, -1, *q.shape[1:])
        regions.append(attention(blocks, rows=batch.prefill).reshape(-1, *q.shape[1:]))
    out = jnp.concatenate(regions).reshape(q.shape)
    out = turn(out) if kv_pages.dtype in TURNED_VALUES else out
    return out.reshape(tokens, -1).astype(q.dtype), kv_pages
