"""Everstream on Ray Serve: replicas of the same application behind Ray's proxy."""
