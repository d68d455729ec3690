"""The sans-IO engine: requests in, events out; time is an argument."""
