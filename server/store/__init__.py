"""Durable sessions: a log that is written before anything is sent, and snapshots of states."""
