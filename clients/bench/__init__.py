"""``everstream bench``: loads a server and says how quickly it answers."""
