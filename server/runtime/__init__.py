"""The async engine: event loop, engine thread and store thread, and the queues between them.

May use `store`, `observability`, `engine`. `sessions` and `api` submit requests here.
"""
