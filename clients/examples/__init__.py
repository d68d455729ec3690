"""Programs that use nothing but the public client; see ``docs/examples.md``."""
