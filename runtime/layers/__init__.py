"""Decoder layer parts: linear layers (dense or factorized), norms, activations and RoPE tables."""
