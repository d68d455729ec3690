"""Beyond one machine: a shared store, sessions that move, and replicas under Ray Serve."""
