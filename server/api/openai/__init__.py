"""OpenAI's routes, and those that its users expect next to them."""
