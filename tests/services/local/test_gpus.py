"""GPUs of workers: a GPU of its own for each rank, sharing only among workers of one rank."""

import pytest

from services.common.errors import SettingsError
from services.local.gpus import GPU_SHARE, WorkerGpus, assign_gpus, visible_gpus


def names(visible: str, ranks: list[int]) -> list[str]:
    """Return the GPUs of each worker, with one letter for each GPU."""
    return ["".join(gpus.names) for gpus in assign_gpus(visible, ranks)]


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        ("abcd", [2, 2], ["ab", "cd"]),
        ("abcdef", [4, 2], ["abcd", "ef"]),
        ("abcdefgh", [2, 2], ["ab", "cd"]),
        ("abcde", [1, 1, 3], ["a", "b", "cde"]),
        ("abcd", [1, 1, 3], ["a", "a", "bcd"]),
        ("abcde", [2, 2, 1], ["ab", "cd", "e"]),
        ("ab", [1, 1, 1], ["a", "b", "a"]),
        ("abc", [1, 1], ["a", "b"]),
        ("abc", [3], ["abc"]),
    ],
)
def test_workers_get_gpus_in_order(visible: str, ranks: list[int], expected: list[str]) -> None:
    assert names(visible, ranks) == expected


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("ranks", [[2, 1], [1, 2], [1, 1, 2], [2, 3, 1], [1, 1, 1, 1, 2, 2]])
def test_no_worker_uses_a_gpu_of_a_worker_with_several_ranks(count: int, ranks: list[int]) -> None:
    """The workers on one GPU use together as much of its memory as one worker alone."""
    visible = [f"GPU-{number}" for number in range(count)]
    own = sum(size for size in ranks if size > 1)
    if own + 1 > count:
        with pytest.raises(SettingsError, match=f"need {own + 1} GPUs; visible: {count} "):
            assign_gpus(visible, ranks)
        return
    assigned = assign_gpus(visible, ranks)
    assert [len(gpus.names) for gpus in assigned] == ranks
    shares: dict[str, list[float]] = {}
    for gpus in assigned:
        for name in gpus.names:
            shares.setdefault(name, []).append(gpus.share)
        if len(gpus.names) > 1:
            assert gpus.share == GPU_SHARE
    assert all(sum(share) == pytest.approx(GPU_SHARE) for share in shares.values())
    assert list(shares) == visible[: len(shares)]


def test_workers_get_no_gpus_on_the_cpu() -> None:
    assert assign_gpus([], [4, 2]) == [WorkerGpus(), WorkerGpus()]


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(SettingsError) as refused:
        assign_gpus(["0", "1", "2"], [2, 2])
    assert str(refused.value) == (
        "the workers need 4 GPUs; visible: 3 (0, 1, 2). Each rank of a worker with several ranks "
        "needs a GPU of its own, 4 in total: reduce --tp or the number of workers, or set "
        "--device cpu"
    )


def test_mig_instances_are_refused_for_several_ranks_only() -> None:
    visible = ["MIG-a", "MIG-b"]
    assert names(visible, [1, 1]) == visible  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="needs whole GPUs"):
        assign_gpus(visible, [2])


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("3, GPU-ab", ["3", "GPU-ab"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("1,1,0", ["1", "0"]),
    ],
)
def test_visible_gpus_follow_the_variable_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, variable: str, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus("auto") == expected
    assert visible_gpus("cpu") == []
