"""A trained model gets another attention: swap, match layer by layer, fine-tune, report."""
