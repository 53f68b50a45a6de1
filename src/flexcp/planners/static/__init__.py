"""The static methods that users know by name, and lower bounds on their times."""
