"""The log of a kept session as a read-only stream of the Durable Streams protocol.

https://github.com/durable-streams/durable-streams/blob/main/PROTOCOL.md
"""
