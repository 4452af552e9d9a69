"""Results of `headrace kv-statistics` on KV that is small enough to compute by hand."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from services.common.errors import SettingsError
from services.offline.kv_measure import KVStatistics, PlaneStatistics, measure
from services.offline.kv_statistics import tables

PAGES, HEADS, SLOTS, DIM = 4, 2, 16, 8
CHUNK = SLOTS * DIM  # elements of a chunk; a plane has 8 chunks, 2,048 bytes
KEYS = ((0, "k"), (0, "v"))
RARE = {126: 1, 90: 1}  # 126 has only a second-level code, 90 has none


def plane(counts: dict[int, int]) -> Tensor:
    """Return a plane in which each chunk has `counts[exponent]` elements of each exponent."""
    exponents = [exponent for exponent, count in counts.items() for _ in range(count)]
    assert len(exponents) == CHUNK
    patterns = torch.tensor(exponents, dtype=torch.int16) << 7
    return patterns.view(torch.bfloat16).view(1, 1, SLOTS, DIM).repeat(PAGES, HEADS, 1, 1)


CALIBRATION = plane(dict.fromkeys(range(119, 126), 18) | {126: 2})  # codes for 119 to 125
COMMON = plane(dict.fromkeys(range(119, 123), 32))
ESCAPING = plane({119: 32, 120: 32, 121: 32, 122: 30} | RARE)


@pytest.fixture(scope="module")
def statistics() -> KVStatistics:
    return measure(
        dict.fromkeys(KEYS, CALIBRATION), dict(zip(KEYS, (COMMON, ESCAPING), strict=True))
    )


def test_payload_bytes_include_headers_and_padding(statistics: KVStatistics) -> None:
    k, v = statistics.planes
    # Bytes: header 64, plane header 16, starts 4 x 9 padded to 48, codes 384 or 512, rests 1,024.
    assert {name: coding.payload_bytes for name, coding in k.codings.items()} == {
        "top16": 1664,
        "in-band": 1664,
        "three-bit": 1536,
    }
    assert k.codings["three-bit"].ratio == 2048 / 1536
    # In each of 8 chunks, 90 takes a word. In three-bit, 126 and 90 also take second-level codes.
    assert v.codings["three-bit"].payload_bytes == 1536 + 8 * (4 + 4)
    assert v.codings["top16"].payload_bytes == 1664 + 8 * 4
    # Both planes in one segment share a header; starts 4 x 17 padded to 80.
    total = statistics.total["three-bit"].payload_bytes
    assert total == 64 + 2 * 16 + 80 + 2 * (384 + 1024) + 8 * (4 + 4)
    assert statistics.total["three-bit"].ratio == 4096 / total


def test_escapes_are_counted_in_the_test_text(statistics: KVStatistics) -> None:
    k, v = statistics.planes
    assert {(coding.escapes, coding.listed) for coding in k.codings.values()} == {(0, 0)}
    assert {name: (c.escapes * CHUNK, c.listed * CHUNK) for name, c in v.codings.items()} == {
        "top16": (1, 1),
        "in-band": (1, 1),
        "three-bit": (2, 1),
    }
    assert statistics.total["three-bit"].escapes == 2 / (2 * CHUNK)
    assert v.exponents == {119: 256, 120: 256, 121: 256, 122: 240, 126: 8, 90: 8}


def test_bound_is_the_entropy_of_each_plane(statistics: KVStatistics) -> None:
    k, v = statistics.planes
    assert k.entropy_ratio == pytest.approx(16 / (2 + 8))  # four exponents, equally frequent
    mean_bits = (16 / k.entropy_ratio + 16 / v.entropy_ratio) / 2
    assert statistics.entropy_ratio == pytest.approx(16 / mean_bits)
    assert statistics.entropy_ratio < k.entropy_ratio


def test_mode_is_picked_on_the_calibration_text(statistics: KVStatistics) -> None:
    assert {plane.picked for plane in statistics.planes} == {"three-bit"}
    assert statistics.total["calibrated"] == statistics.total["three-bit"]
    wide = plane(dict.fromkeys(range(100, 116), 8))
    mixed = measure(dict(zip(KEYS, (wide, CALIBRATION), strict=True)), dict.fromkeys(KEYS, COMMON))
    assert [plane.picked for plane in mixed.planes] == ["top16", "three-bit"]
    assert statistics.test_tokens == statistics.calibration_tokens == PAGES * SLOTS


def test_table_has_a_row_for_each_layer(statistics: KVStatistics) -> None:
    totals, layers = (part.splitlines() for part in tables(statistics).split("\n\n"))
    assert totals[4] == "| three-bit | 1.3403 | 0.781 % | 0.3906 % |"
    header, rule, row = layers
    assert header.count("|") == rule.count("|") == row.count("|") == 12
    assert row.startswith("| 0 | 1.231 | 1.231 | **1.333** | 1.600 | 0.0 / 0.0000 |")
    assert row.endswith(" 1.6 / 0.7812 |")
    assert json.loads(json.dumps(asdict(statistics)))["planes"][1]["codings"]["top16"]


def test_plot_shows_k_and_v_and_is_reproducible(statistics: KVStatistics, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    from services.offline.kv_plot import draw

    for name in ("a.svg", "b.svg"):
        draw(statistics, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    texts = {element.text for element in ElementTree.parse(tmp_path / "a.svg").iter()}
    assert {"K", "V", "top16", "in-band", "three-bit", "order-0 entropy bound"} <= texts


@pytest.mark.parametrize(
    ("share", "exponent"), [(0.0, 90), (0.1, 100), (0.11, 101), (0.5, 101), (0.91, 110), (1.0, 110)]
)
def test_quantile_is_not_exceeded_by_that_share(share: float, exponent: int) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    from services.offline.kv_plot import quantile

    counts = {110: 10, 100: 5, 90: 5, 101: 80}
    assert quantile(PlaneStatistics(0, "k", counts, 1.0, "top16", {}), share) == exponent


def test_missing_matplotlib_error_has_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "services.offline.kv_plot", raising=False)
    with pytest.raises(SettingsError, match=r"pip install .*\[plots\]"):
        importlib.import_module("services.offline.kv_plot")
