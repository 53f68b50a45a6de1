"""Files and terminals: JSON from users, files written whole, folders that are ours alone, text that is safe to show."""
