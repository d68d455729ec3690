"""The numbered tests of what the server must survive: see ``docs/background/reliability.md``."""
