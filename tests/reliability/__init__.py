"""The numbered tests of what the server must survive: see ``docs/reliability.md``."""
