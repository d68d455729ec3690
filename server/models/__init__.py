"""The served models: building one from its files, the registry, loading and replacing."""
