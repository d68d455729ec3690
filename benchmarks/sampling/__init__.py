"""The choice of the default sampling parameters."""
