"""The async engine: event loop, engine thread and store thread, and the queues between them."""
