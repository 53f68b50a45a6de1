"""Planners of published systems as strategies, to compare with: what a user would use otherwise.

| strategy | from | tokens | traffic |
| --- | --- | --- | --- |
| `dhp:b` | DHP, flexible groups | documents packed into groups of any number of ranks | a group's keys round a ring |
| `fcp:b` | FCP, block level | zig-zag pairs of b tokens, balanced in work and tokens | exactly the keys that are read |
| `dcp:b` | DCP | blocks of b tokens and tiles, by hypergraph partitioning | exactly what tiles read |
| `minheap:c` | MagiAttention's default | chunks of c tokens of the packed stream, equally many per rank | as `fcp` |
| `pow2:b` | Megatron's dynamic CP | documents zig-zag in groups of a power of two of ranks | as `dhp` |
| `hdp:b` | ByteScale | long documents over ceil(n / b) ranks, short ones whole | exactly the keys that are read |
| `wlb` | WLB-LLM | zig-zag of each document, or of the stream if that wins | all keys to all |

Each is in a file of its own; shared steps are in :mod:`~flexcp.planners.published.ranges`. They are the *planning* of
these systems, not their kernels or loaders, and their plans run on our executor. If a system runs several micro-batches
one after the other, a plan is one of them. All of these planners refuse tolerances and ignore rank speeds, and
`max_tokens_per_rank` is only checked afterwards, unless the file says more. `auto`, `groups`, `blocks` and `hypergraph`
are flexcp's own.
"""
