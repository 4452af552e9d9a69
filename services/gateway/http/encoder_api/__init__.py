"""Embeddings, rerank and score over HTTP."""
