"""Attention in the CuTe DSL, for Hopper."""
