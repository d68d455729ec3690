"""A real server under load, alone or compared with other servers."""
