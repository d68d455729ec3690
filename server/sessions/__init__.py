"""Kept sessions wherever they are: loading, ownership, prefix states, import and export.

May use `runtime` and what is below it. Each served model in `models` has one `Sessions`.
"""
