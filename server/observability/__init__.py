"""Logs, metrics and tracing.

May use `engine` (types). Every layer above may use it.
"""
