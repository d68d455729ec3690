"""Messages to the text that a model was taught to read."""
