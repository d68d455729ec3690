"""The sans-IO engine: requests in, events out; time is an argument.

May use errors, `model`, numpy and torch; no threads, sockets, files or clocks. `runtime` runs it in
a thread.
"""
