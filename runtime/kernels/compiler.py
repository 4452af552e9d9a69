"""Process that compiles kernels for `runtime.kernels.compile_pool`.

It reads pickled `KernelSource` objects from standard input. After each it writes a line to standard
output: an error message, empty if the kernel was compiled. It ends at the end of its input, and
when the thread that started it ends.
"""

import ctypes
import os
import pickle
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Compile kernels until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    while True:
        try:
            source = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            source.compile()
            reply = ""
        except Exception as error:  # noqa: BLE001 - reported to the parent process
            reply = repr(error)
        replies.write(reply.replace("\n", " ")[:1000] + "\n")


if __name__ == "__main__":
    main()
