"""The event simulator: a plan's slots, messages and ports on simulated time.

slot_work.py             plan -> nanoseconds of every rank in every slot
compiled_held.py         what ranks hold of queries and keys, compiled
compiled_cuts.py         regions cut along that, compiled
ring_work.py             the same of a ring, by its rule: what its positions see of each other (ring_counts.py), and
                         when their keys are there
compiled_ring_runs.py    the runs of a ring, document by document, and whether they are one's, compiled
compiled_rings.py        the counts of a ring, compiled
compiled_ring_slots.py   the slots of a ring's keys, compiled
copies.py                plan -> nanoseconds of packing and taking in, of every rank in every stage
                         (compiled_copies.py: their bytes, compiled)
messages.py              plan -> chunks of messages in the order of their rounds, with how long each holds its ports
compiled_events.py       the events, compiled: slots begin, compute ends, chunks come and go
passes.py                one pass (a mask, a direction) of all ranks: Pass, and its timeline
bounds.py                what no placement can be faster than
step_parts.py            what a step consists of beside attention: Training
training.py              attention alone or a whole training step: Simulation
"""
