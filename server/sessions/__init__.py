"""Kept sessions wherever they are: loading, ownership, prefix states, import and export."""
