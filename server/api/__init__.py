"""What clients see: the ASGI application with its routes, WebSockets and event streams.

May use `models` and what is below it, of the engine only its types. `http` and `cluster` serve it.
"""
