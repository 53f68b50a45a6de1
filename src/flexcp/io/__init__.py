"""Files and terminals: JSON from users, atomic writes, folders that only the user can write, safe terminal text."""
