"""The Responses API, over HTTP and in WebSocket mode."""
