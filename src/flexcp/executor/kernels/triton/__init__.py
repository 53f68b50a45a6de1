"""Attention kernels in Triton."""
