"""Serving benchmark: deployments and peers, measured by the same cases and compared in one report.

See `tests/e2e/README.md` for its commands.
"""
