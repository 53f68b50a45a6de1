"""The strategy ``hypergraph``: token blocks and tiles of attention as a hypergraph that is partitioned over ranks."""
