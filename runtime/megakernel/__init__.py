"""A decode step of a few sequences as one persistent kernel launch."""
