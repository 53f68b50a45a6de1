"""The event simulator: it runs the slots and messages of a plan on simulated time.

slot_work.py             how long every rank computes in every slot of a plan
compiled_held.py         the queries and keys that ranks hold, as segments of the stream (compiled)
compiled_cuts.py         the (query, key) pairs of every slot, from regions cut along these segments (compiled)
ring_work.py             the work of every slot for a ring, which is counted by position instead of by region
ring_counts.py           the pairs between the positions of a ring
compiled_ring_runs.py    the runs of a ring by document, and whether a placement is that of a ring (compiled)
compiled_rings.py        the loops that count a ring's pairs (compiled)
compiled_ring_slots.py   the slots in which the keys of a ring arrive (compiled)
copies.py                how long every rank packs and unpacks messages in every stage
compiled_copies.py       the bytes that packing and unpacking read and write (compiled)
least_copies.py          a lower estimate of the time of copies, from a prediction, before there is a plan
messages.py              the chunks of messages in the order of their rounds, and how long each holds its ports
compiled_events.py       the events: slots begin, compute ends, chunks start and arrive (compiled)
passes.py                one pass (one mask, one direction) of all ranks, and its timeline
bounds.py                lower bounds on the time of a pass, for any placement
step_parts.py            the parts of a training step besides attention
training.py              the simulation of attention alone or of a whole training step
"""
