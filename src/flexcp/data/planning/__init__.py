"""Planning ahead of the training loop: orders for planner processes, the processes, and plans shared between ranks."""
