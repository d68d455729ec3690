"""Small language models whose attention runs as an RNN: constant state, three forms."""
