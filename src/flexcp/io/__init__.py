"""Files, terminals and settings: JSON from users, atomic writes, private folders, safe text, values of a wrong kind."""
