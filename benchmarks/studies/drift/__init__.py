"""The growth of rounding errors in a long stream."""
