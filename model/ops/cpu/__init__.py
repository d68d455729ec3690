"""The recurrence on a CPU without torch: the native runtime."""
