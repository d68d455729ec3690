"""Everstream's own routes: sessions, models, administration, health, pages.

May use `api.schemas`, `api.auth` and the layers below `api`. `api.app` mounts them.
"""
