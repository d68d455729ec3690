"""OpenAI's routes, one file each, and those that its users expect beside them."""
