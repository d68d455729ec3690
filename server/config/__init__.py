"""The server's configuration: settings with their sources, and the TOML file."""
