"""Replicas of one store under faults drawn from a seed, and the proof that no client was misled.

``python -m tests.chaos --seed N --minutes M --report FILE``.
"""
