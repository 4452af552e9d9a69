"""Tests of the quality and serving-overhead measurements, on the CPU."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.programs.quality import Agreement, measure
from tests.programs.rpc_delay import Sample, step_ms


def test_agreement_counts_errors_and_equal_tokens() -> None:
    expected = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = Agreement()
    found.add(expected, expected)
    assert (found.error, found.top1) == (0.0, 1.0)
    found.add(torch.tensor([[3.0, 0.0], [5.0, 4.0]]), expected)
    assert found.error == pytest.approx((25 / 50) ** 0.5)
    assert found.rows == pytest.approx([0.0, 0.0, 0.0, 5 / 4])
    assert found.typical == 0.0
    assert found.top1 == 0.75


@pytest.mark.long
def test_cpu_output_differs_only_at_near_ties() -> None:
    """Only the KV is bf16, so logits are closer to fp32 than those of transformers in bf16."""
    found = measure("smollm2-135m", "cpu", 3)
    assert found.ours.error < 0.01
    assert found.ours.error < found.bf16.error / 2
    assert found.ours.top1 > 0.98
    assert found.equal + len(found.gaps) == 3
    assert all(gap < 0.05 for gap in found.gaps)


def test_step_time_uses_only_samples_in_which_all_streams_run() -> None:
    samples = [Sample(1, 10, 5.0), Sample(2, 100, 6.0), Sample(2, 300, 6.5), Sample(1, 900, 9.0)]
    assert step_ms(samples, 2) == pytest.approx(2.5)
    with pytest.raises(ValueError, match="increase --tokens"):
        step_ms(samples[2:], 2)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_serving_overhead_of_a_random_model() -> None:
    """The model is written as a canonical checkpoint with a tokenizer, then served."""
    command = [
        sys.executable,
        "-m",
        "tests.programs.rpc_delay",
        "--device",
        "cpu",
        "--shape",
        "tiny",
    ]
    done = subprocess.run(
        [*command, "--streams", "2", "--tokens", "4000"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = " ".join(done.stdout.split())
    assert re.search(r"tiny, 2 streams on cpu: a step [\d.]+ ms alone, [\d.]+ ms served", line), (
        line
    )
