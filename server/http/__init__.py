"""The uvicorn process: HTTP and WebSocket protocols, accepting connections, shutdown.

May use `api` and what is below it. The command line and Ray's replicas run it.
"""
