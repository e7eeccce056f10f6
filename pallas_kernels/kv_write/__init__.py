"""Writing a step's keys and values into the pages of the KV cache."""

from pallas_kernels.kv_write.api import kernel_module, write_kv

__all__ = ["kernel_module", "write_kv"]
