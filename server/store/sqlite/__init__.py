"""The store in a folder: SQLite, with states in files next to it."""
