"""Errors of the load generator.

LoadgenError
└── UsageError      unusable options, files or target, or a missing package
"""


class LoadgenError(Exception):
    """Base class of the package's errors. The message is shown to the user."""


class UsageError(LoadgenError):
    """Unusable options, files or target, or a missing package."""
