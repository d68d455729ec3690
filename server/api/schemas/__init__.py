"""Requests and responses on the wire: validation, encoding, descriptions.

May use errors and the engine's types. Routes and WebSockets use it.
"""
