"""The product with weights of few bits."""

from pallas_kernels.quantized_matmul.api import Kernel, MatmulBackend, find_kernel, unsupported_by_gpu

__all__ = ["Kernel", "MatmulBackend", "find_kernel", "unsupported_by_gpu"]
