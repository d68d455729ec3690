"""The uvicorn process: HTTP and WebSocket protocols, accepting connections, shutdown."""
