"""Serving benchmark: deployments and peers, measured by the same cases and compared in one report.

See `tests/programs/README.md` for its commands.
"""
