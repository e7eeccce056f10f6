"""A step-time table for a machine that is not here, from two numbers of its data sheet; measures nothing.

The roofline (Williams, Waterman and Patterson 2009): a step takes the longer of moving its bytes at the memory's peak
bandwidth and doing its arithmetic at the peak rate. Real steps take longer; the table says which load is out of reach,
and how configurations compare, not what a user will see.
"""

import math

import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape, step_shapes
from jaxserve.simulation.step_times import PageCopyTime, StepTime, StepTimes, config_digest
from models.config import ModelConfig
from models.registry import parameter_structs
from models.step import KVPool


def estimate_step_times(
    config: EngineConfig,
    model: ModelConfig,
    *,
    bytes_per_s: float,
    flops_per_s: float,
    bus_bytes_per_s: float = 16e9,
) -> StepTimes:
    """The table of a resolved configuration, weights and pages in its own dtypes.

    Args:
      bytes_per_s, flops_per_s: the device's peaks; of all devices together where a mesh shares each layer.
      bus_bytes_per_s: between host and device, each way; PCIe 3.0 x16 has about 16 GB/s.
    """
    assert isinstance(config.model.max_model_len, int), "the configuration is not resolved"
    assert isinstance(config.execution.block_q, int)
    assert config.cache.page_size != "auto"
    assert config.cache.dtype != "auto"
    assert config.execution.decode_buckets != "auto"
    assert config.execution.prefill_buckets != "auto"
    block_q, rows_limit = config.execution.block_q, config.scheduler.max_num_seqs
    dtype = jnp.dtype(config.model.dtype)
    head = model.vocab_size * model.hidden_size
    body = sum(
        math.prod(struct.shape)
        for name, struct in parameter_structs(model, dtype).items()
        if not name.startswith(("embed_tokens", "lm_head"))
    )
    key_bytes = KVPool.page_bytes(model, 1, config.cache.dtype)
    flops_per_query_and_key = 4 * model.num_heads * model.head_dim * model.num_layers

    def seconds(shape: StepShape, context: int) -> tuple[int, float]:
        decode_keys, block_keys = shape.decode_rows * context, shape.prefill_blocks * context
        tokens = shape.decode_rows + shape.prefill_blocks * block_q
        samples = min(rows_limit, shape.decode_rows + shape.prefill_blocks)
        moved = (body + head) * dtype.itemsize + (decode_keys + block_keys) * key_bytes
        flops = 2 * body * tokens + 2 * head * samples
        flops += flops_per_query_and_key * (decode_keys + block_keys * block_q)
        return decode_keys + block_keys, max(moved / bytes_per_s, flops / flops_per_s)

    steps = []
    for shape in step_shapes(config.execution.decode_buckets, config.execution.prefill_buckets):
        for context in sorted({1, config.model.max_model_len // 4, config.model.max_model_len} - {0}):
            keys, step_s = seconds(shape, context)
            steps.append(
                StepTime(
                    decode_rows=shape.decode_rows,
                    prefill_blocks=shape.prefill_blocks,
                    kv_tokens=keys,
                    seconds=step_s,
                )
            )
    page_s = KVPool.page_bytes(model, config.cache.page_size, config.cache.dtype) / bus_bytes_per_s
    return StepTimes(
        device=f"{bytes_per_s / 1e9:,.0f} GB/s and {flops_per_s / 1e12:,.1f} TFLOP/s",
        jax_version="none",
        model=config.model.name,
        config_digest=config_digest(config),
        source="estimate",
        block_q=block_q,
        page_copy=PageCopyTime(save_seconds=page_s, restore_seconds=page_s) if config.cache.host_pages else None,
        steps=tuple(steps),
    )
