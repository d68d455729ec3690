"""Minutes of everything that clients do to a server."""
