"""Child processes for work that could hang or exhaust this one: start, turns, replacement."""
