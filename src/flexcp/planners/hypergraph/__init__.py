"""The strategy ``hypergraph``: blocks and tiles as a hypergraph, partitioned."""
