"""Programs that use only the public client; see ``docs/use/examples.md``."""
