"""Kept sessions wherever they are: loading, holding, prefix states, import and export."""
