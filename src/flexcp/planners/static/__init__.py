"""The static methods that users know by name, and bounds on what they can reach."""
