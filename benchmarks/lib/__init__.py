"""What benchmarks share, and tests too: checks on a GPU, runs of models, ranks in network namespaces, ..."""
