"""The kinds of tokenizer that checkpoints have: each gives ids for a text and bytes for an id."""
