"""What a user would otherwise pick, as strategies: published systems' planners over our tables, to compare with.

| strategy | from | tokens | traffic |
| --- | --- | --- | --- |
| `dhp:b` | DHP, flexible groups | documents packed into groups of any number of ranks | a group's keys round a ring |
| `fcp:b` | FCP, block level | zig-zag pairs of b tokens, balanced in work and tokens | exactly the keys that are read |
| `dcp:b` | DCP | blocks of b tokens and tiles, a hypergraph cut from nothing | exactly what tiles read |
| `minheap:c` | MagiAttention's default | chunks of c tokens of the packed stream, as many a rank | as of `fcp` |
| `pow2:b` | Megatron's dynamic CP | documents zig-zag in groups of a power of two of ranks | as of `dhp` |
| `hdp:b` | ByteScale | long documents over ceil(n / b) ranks, short ones whole | exactly the keys that are read |
| `wlb` | WLB-LLM | zig-zag of each document, or of the stream if that wins | all keys to all |

A file each; steps that several share are in :mod:`~flexcp.planners.published.ranges`. They are the *planning* of these
systems, not their kernels or loaders, and they run on our executor. Where a system runs several micro-batches after one
another, one plan is one of them. None of them knows tolerances or rank speeds, and `max_tokens_per_rank` is only
checked unless its file says more. `auto`, `groups`, `blocks` and `hypergraph` are ours.
"""
