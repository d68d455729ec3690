"""Messages of a chat as a model reads and writes them: templates, turns, thinking, calls."""
