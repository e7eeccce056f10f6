"""What a backend must know of a model and a device to say whether it can serve them."""

import dataclasses

from pallas_kernels.kv_dtype import KVDtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One model's attention on one device.

    Attributes:
      dtype, kv_dtype: of the queries and of the cache, by name.
      platform: of the device, as jax names it: cpu, tpu, gpu.
      compute_capability: of an NVIDIA GPU, such as 9.0; 0 elsewhere.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    block_q: int
    dtype: str
    kv_dtype: KVDtype
    platform: str
    compute_capability: float = 0.0
