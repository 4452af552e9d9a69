"""Threads of the processes of a worker."""

import sys

SWITCH_S = 5e-5
"""Python's thread switch interval while a worker runs. The default of 5 ms is longer than a decode
step, which the engine thread must launch while the event loop serves many streams."""


def set_switch_interval() -> None:
    """Set the interval at which Python switches between the threads of this process."""
    sys.setswitchinterval(SWITCH_S)
