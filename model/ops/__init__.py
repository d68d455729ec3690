"""The arithmetic that mechanisms share, in readable torch: the reference for every faster form."""
