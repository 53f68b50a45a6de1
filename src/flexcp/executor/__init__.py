"""The executor: runs any plan on real ranks, and decides nothing."""
