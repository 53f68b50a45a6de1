"""Speeds: measure how fast ranks compute while they train, and correct the speeds that the planner assumes."""
