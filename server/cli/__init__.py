"""The command line: serve, generate, inspect, state, keys, store and the others."""
