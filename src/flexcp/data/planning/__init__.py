"""What a planner process is asked for and what it gives back; nothing here needs torch."""
