"""Figures of the docs: every table that comes from a committed result, and its page."""
