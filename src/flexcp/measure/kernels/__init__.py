"""Benchmarks of attention kernels by themselves."""
