"""The benchmark of the channel between ranks runs with a small batch."""

from dataclasses import astuple

from runtime.offline.bench.channel import figure


def test_channel_benchmark_runs() -> None:
    assert min(astuple(figure(sequences=3, tokens=40, followers=2, runs=20))) > 0
