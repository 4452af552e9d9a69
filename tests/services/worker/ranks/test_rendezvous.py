"""Limits of the process group of a worker's ranks."""

import os
from pathlib import Path

import pytest

from services.worker.ranks.rendezvous import Rendezvous


@pytest.mark.parametrize(("step_s", "timeout_s"), [(60, 600), (3600, 3600)])
def test_collectives_may_take_as_long_as_a_step(step_s: float, timeout_s: float) -> None:
    rendezvous = Rendezvous.create(2, step_s=step_s)
    os.close(int(Path(rendezvous.path).name))
    assert rendezvous.timeout_s == timeout_s
