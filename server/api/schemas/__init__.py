"""Requests and responses on the wire: validation, encoding, descriptions."""
