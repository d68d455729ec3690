"""The numbered tests of what the server must survive: see ``docs/contribute/kept-sessions.md``."""
