"""The wire: HTTP, SSE and WebSocket, over the driver and nothing below it."""
