"""``everstream bench``: puts load on a server and measures latency and throughput."""
