"""Attention and KV-cache kernels. One folder a kernel; they know arrays and nothing else."""
