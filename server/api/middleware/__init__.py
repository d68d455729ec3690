"""ASGI middleware and the checks that a request passes before its route.

May use `api.auth` and the errors of `api`. `api.app` puts it around the routes.
"""
