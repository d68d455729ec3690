"""Objects by name in a folder or in S3-compatible storage."""
