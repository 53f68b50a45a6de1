"""What several benchmarks, or a benchmark and tests, share."""
