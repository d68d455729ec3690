"""Child processes for work that could hang or exhaust this one: framing, start, turns, replacement.

May use the standard library only. `constraints` tries formats in one, `chat` renders templates.
"""
