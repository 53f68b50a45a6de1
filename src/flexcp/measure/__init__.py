"""Measuring: real ranks, verification, and what else knows both planning and execution."""
