"""The served models: building one from its files, the registry, loading and replacing.

May use `sessions` and what is below it. `api` looks models up here; `cli` and `cluster` build them.
"""
