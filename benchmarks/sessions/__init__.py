"""Durable sessions: cost, wake, resume, restart."""
