"""Every mechanism at the same size, tokens, optimiser and seeds: quality, recall, speed, bytes."""
