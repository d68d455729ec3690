"""A model that was trained here, in other programs."""
