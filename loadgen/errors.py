"""What keeps a run from starting.

LoadgenError
└── UsageError      options, files or a target that cannot be used as they are
"""


class LoadgenError(Exception):
    """Root of the package's errors; the message is for the user."""


class UsageError(LoadgenError):
    """Options, files or a target that cannot be used as they are."""
