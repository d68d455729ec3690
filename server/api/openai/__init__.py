"""OpenAI's routes, and those that its users expect next to them.

May use `api.schemas`, `api.auth` and the layers below `api`. `api.app` mounts them.
"""
