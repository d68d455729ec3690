"""Programs that use only the public client; see ``docs/examples.md``."""
