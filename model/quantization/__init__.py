"""Checkpoints with smaller weights, and what each precision costs in quality; without torch."""
