"""The card of the bundled models and the facts in it."""
