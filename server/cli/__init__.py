"""The command line: serve, generate, inspect, state, keys, store and the others.

May use every layer of the server. Nothing imports it; ``everstream`` runs `main`.
"""
