"""The product with weights of few bits."""

from pallas_kernels.quantized_matmul.api import Kernel, find_kernel

__all__ = ["Kernel", "find_kernel"]
