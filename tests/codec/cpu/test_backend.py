"""CPU backend: thread safety, and compilation and caching of the loops."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

import codec
from codec.cpu import backend as cpu
from codec.cpu import jit, loops
from codec.reference import backend as reference
from tests.codec.samples import BOOK, EVERY, dtype_of, make_pages

ENTRY_POINTS = ("encode_segment", "scan_segment", "decode_segment", "checksum_segment")


@pytest.mark.long
def test_concurrent_threads_encode_and_decode_equal_bytes(codebook: codec.Codebook) -> None:
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


@pytest.mark.few(40)
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


def test_loops_compile_without_a_writable_cache(
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

    assert jit.compiled(double)(np.array([21])) == 42


def test_cache_stamp_changes_with_any_source_of_the_package(tmp_path: Path) -> None:
    package = Path(codec.__file__).parent
    assert package == jit._PACKAGE
    assert jit._stamp_of(package) == jit._STAMP
    assert loops.encode_segment.__qualname__.endswith(jit._STAMP)
    copy = tmp_path / "codec"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    stamps = [jit._stamp_of(copy)]
    assert stamps == [jit._STAMP]
    folders = {source.parent for source in copy.rglob("*.py")}
    assert {copy, copy / "cpu", copy / "gpu", copy / "gpu" / "kernels"} <= folders
    for folder in sorted(folders):
        source = min(folder.glob("*.py"))
        source.write_text(source.read_text() + "\n")
        stamps.append(jit._stamp_of(copy))
    assert len(set(stamps)) == 1 + len(folders)


def test_warm_up_compiles_all_types_and_modes() -> None:
    codec.warm_up()
    before = {name: len(getattr(loops, name).signatures) for name in ENTRY_POINTS}
    assert all(count == 1 for count in before.values())
    for name, book in EVERY.items():
        source = make_pages(17, kind="mixed", dtype=dtype_of(name))
        out = torch.empty(source.bound, dtype=torch.uint8)
        encoded = codec.encode_pages(source.planes, [book, None], source.ids, 17, out)
        codec.decode_pages(out[: encoded.length], source.planes, [book, None], source.ids, 17)
    assert before == {name: len(getattr(loops, name).signatures) for name in ENTRY_POINTS}
