"""Attention kernels for Hopper GPUs in NVIDIA's CuTe DSL."""
