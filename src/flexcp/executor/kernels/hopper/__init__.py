"""Attention kernels for Hopper GPUs in Gluon."""
