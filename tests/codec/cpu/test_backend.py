"""What the compiled loops promise beside their bytes: threads, and life without a cache."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

import codec
from codec.cpu import backend as cpu
from codec.cpu import jit as compiled
from codec.cpu import loops
from codec.reference import backend as reference
from tests.codec.samples import BOOK, EVERY, dtype_of, make_pages

ENTRY_POINTS = ("encode_segment", "scan_segment", "decode_segment", "checksum_segment")


def test_threads_encode_and_decode_side_by_side(codebook: codec.Codebook) -> None:
    source = make_pages(200, num_planes=8, kind="mixed")
    books = [codebook] * 8

    def round_trip(_: int) -> tuple[int, list[int]]:
        out = torch.empty(source.bound, dtype=torch.uint8)
        encoded = codec.encode_pages(source.planes, books, source.ids, 200, out)
        planes = [torch.empty_like(plane) for plane in source.planes]
        codec.decode_pages(out[: encoded.length], planes, books, source.ids, 200)
        return encoded.checksum, out[: encoded.length].tolist()

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(round_trip, range(12)))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("columns", [1, 2, 7, 31, 32, 33])
def test_chunks_of_any_number_of_columns_have_the_reference_bytes(name: str, columns: int) -> None:
    book, dim = EVERY[name], 32 * columns - columns % 3
    for kind in ("normal", "random", 0.1, 0.4) if book else ("random",):
        source = make_pages(
            1, slots=1, kv_heads=2, dim=dim, kind=kind, book=book or BOOK, dtype=dtype_of(name)
        )
        segments = []
        for backend in (reference, cpu):
            out = torch.empty(source.bound, dtype=torch.uint8)
            encoded = codec.encode_pages(
                source.planes, [book, None], source.ids, 1, out, backend=backend
            )
            segments.append((encoded, out[: encoded.length].tolist()))
        assert segments[0] == segments[1]


def test_without_a_place_for_the_cache_loops_compile_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_for_real = numba.njit

    def njit(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_for_real(**options)

    monkeypatch.setattr(numba, "njit", njit)

    def double(values: Any) -> int:
        return int(2 * values[0])

    assert compiled.compiled(double)(np.array([21])) == 42


def test_compiled_loops_are_known_by_all_sources_that_they_may_come_from(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("A = 1")
    (tmp_path / "b.py").write_text("B = 1")
    before = compiled._stamp_of(tmp_path)
    assert compiled._stamp_of(tmp_path) == before
    (tmp_path / "b.py").write_text("B = 2")
    assert compiled._stamp_of(tmp_path) != before
    assert loops.encode_segment.__qualname__.endswith(compiled._STAMP)


def test_warm_up_leaves_nothing_to_compile_for_any_type_and_mode() -> None:
    codec.warm_up()
    before = {name: len(getattr(loops, name).signatures) for name in ENTRY_POINTS}
    assert all(count == 1 for count in before.values())
    for name, book in EVERY.items():
        source = make_pages(17, kind="mixed", dtype=dtype_of(name))
        out = torch.empty(source.bound, dtype=torch.uint8)
        encoded = codec.encode_pages(source.planes, [book, None], source.ids, 17, out)
        codec.decode_pages(out[: encoded.length], source.planes, [book, None], source.ids, 17)
    assert before == {name: len(getattr(loops, name).signatures) for name in ENTRY_POINTS}
