"""Speeds of ranks, measured while they train, as numbered corrections to what the planner takes them for."""
