"""Replicas of one store under faults drawn from a seed, and the proof that nobody saw a lie.

``python -m tests.chaos --seed N --minutes M --report FILE``.
"""
