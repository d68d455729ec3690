"""CPU time of the server around a model that costs nothing."""
