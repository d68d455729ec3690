"""Real clients, as the registries have them, against a real server: `make compat`."""
