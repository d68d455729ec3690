"""What clients see: the ASGI application with its routes, WebSockets and event streams."""
