"""The server's configuration: settings with their sources, and the TOML file.

May use nothing of the server. Built once by `cli` (or Ray's application) and passed explicitly.
"""
