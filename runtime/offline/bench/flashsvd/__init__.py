"""Backends and experiments of the FlashSVD papers for encoders.

``python -m runtime.offline.bench encoder --help``. The backends are our own implementations of what
the papers describe, for comparison; no server uses them.
"""
