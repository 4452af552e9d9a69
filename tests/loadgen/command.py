"""The command `headrace-loadgen` in this process, which spares an interpreter for each run."""

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from loadgen.cli import main

ANY_LAG = ("--most-lag", "60")
"""Flags that tolerate a busy machine."""


def loadgen(*arguments: str | Path) -> tuple[int, str]:
    """Run the command and return its exit code and output, with all white space as one space.

    It leaves no handler of SIGINT, which would be called between the runs of a sweep.
    """
    handler = signal.getsignal(signal.SIGINT)
    output = io.StringIO()
    command = ["headrace-loadgen", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    assert signal.getsignal(signal.SIGINT) is handler
    return code, " ".join(output.getvalue().split())
