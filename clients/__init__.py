"""Clients of a running Everstream server; they import neither `server` nor `model`."""
