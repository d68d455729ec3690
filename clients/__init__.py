"""Clients of a running Everstream server. They do not import `server` or `model`."""
