"""API keys: where they are read, what each may do, and how much.

May use the schemas and errors of `api`. Middleware and routes ask it for the caller.
"""
