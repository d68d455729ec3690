"""Several replicas: the parts that share a PostgreSQL store, and replicas under Ray Serve (`ray`).

May use every layer below: `http`, `api`, `models` and so on. The command line imports it, and only
when the configuration asks for it.
"""
