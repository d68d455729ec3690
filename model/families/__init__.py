"""Model families other than our own block: a folder for each."""
