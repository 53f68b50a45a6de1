"""Arithmetic on columns of integers, and the compiled loops' decorator: what knows nothing of attention."""
