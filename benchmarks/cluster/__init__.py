"""Replicas on one shared store: what it costs, and how soon another replica continues."""
