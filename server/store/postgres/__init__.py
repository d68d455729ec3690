"""The store that replicas share: PostgreSQL, with states in the database or in objects."""
