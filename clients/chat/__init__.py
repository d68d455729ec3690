"""``everstream chat``: a conversation in the terminal, whose past can be left and come back to."""
