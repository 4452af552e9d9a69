"""What keeps a run from starting, and what makes it worthless.

LoadgenError
├── UsageError      options, files or a target that cannot be used as they are
└── RunInvalid      what was measured says nothing of the target
"""


class LoadgenError(Exception):
    """Root of the package's errors; the message is for the user."""


class UsageError(LoadgenError):
    """Options, files or a target that cannot be used as they are."""


class RunInvalid(LoadgenError):
    """What was measured says nothing of the target: the generator itself was late, say."""
