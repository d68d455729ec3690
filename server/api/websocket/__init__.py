"""WebSocket ``/v1/stream``: one socket, many requests.

May use `api.schemas`, `api.auth` and the layers below `api`. `api.app` mounts it.
"""
