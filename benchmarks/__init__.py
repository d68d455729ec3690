"""Measurements, for ``make bench`` and ``make soak``: each ends with one line of JSON."""
