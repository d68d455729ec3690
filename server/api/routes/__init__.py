"""Everstream's own routes: sessions, models, administration, health, pages."""
