"""Layers of the decoder: packed projections, dense or factorized."""
