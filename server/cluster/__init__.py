"""Several replicas: the parts that share a PostgreSQL store; `ray` runs them under Ray Serve."""
