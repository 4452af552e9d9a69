"""Arguments of the benchmark of KV formats; the benchmark itself needs a GPU."""

import pytest

from runtime.kv.registry import COMPRESSED
from runtime.offline.bench import kv


def test_defaults_are_two_cases_and_all_formats_with_kernels() -> None:
    args = kv.parser().parse_args([])
    assert args.cases == [(16, 8192), (4, 32_768)]
    fused = {"fp8", "fp8-e5m2", "int4", "k4v2", "stream8", "stream4"}
    assert fused == set(args.formats) & set(COMPRESSED)
    calibrated = {"fdc", "fdc-tiles", "fdc-no-balance", "palu", "palu-heads", "shard"}
    assert calibrated <= set(args.formats)
    assert sum(args.fdc_ranks) / len(args.fdc_ranks) == 51
    assert kv.options_of(args) == {}


@pytest.mark.parametrize("seed", range(5))
def test_ragged_lengths_keep_the_number_of_tokens_and_the_range(seed: int) -> None:
    lengths = kv.arxiv_lengths(16, 8192, seed)
    assert len(lengths) == 16
    assert sum(lengths) == 16 * 8192
    assert len(set(lengths)) > 8
    assert max(lengths) <= 14.1 / 1.6 * min(lengths) + 16


def test_cases_and_kernel_options_are_parsed() -> None:
    args = kv.parser().parse_args(["--cases", "2x100", "1x7", "--tile", "64", "--registers", "168"])
    assert args.cases == [(2, 100), (1, 7)]
    assert kv.options_of(args) == {"tile": 64, "registers": 168}


@pytest.mark.parametrize("arguments", [["--cases", "16"], ["--formats", "dense"]])
def test_malformed_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        kv.parser().parse_args(arguments)


def test_rows_end_with_the_ratio_to_dense() -> None:
    assert str(kv.Compared("int4", 1.0, 0.5, 2.5)).endswith("50.0%    2.50x")
    assert str(kv.Compared("encode", 1.0, 0.5)).endswith("50.0%")
