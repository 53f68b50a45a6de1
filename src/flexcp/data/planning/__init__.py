"""Planning ahead of the training loop: what a planner process is asked for, the processes,
and plans shared between ranks.
"""
