"""The sans-IO engine: no asyncio, threads, sockets or clocks; time is an argument."""
