"""Decoder models: layers, their parts, and the families they are built from."""
