"""Durable sessions: a write-ahead log, snapshots of states, named states.

May use `engine` (types and values). `models` opens it; `runtime` writes to it from a thread.
"""
