"""The laboratory: what mechanisms and models are worth, and pages made from results."""
