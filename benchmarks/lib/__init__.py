"""Code that several benchmarks, or a benchmark and tests, share."""
