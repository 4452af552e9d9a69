"""Embeddings and scores: requests for encoder workers."""
