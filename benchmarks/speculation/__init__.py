"""Several tokens a step: what drafts gain, and what they cost where they gain nothing."""
