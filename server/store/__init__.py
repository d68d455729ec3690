"""Durable sessions: a write-ahead log, snapshots of states, named states."""
