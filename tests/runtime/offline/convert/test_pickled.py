"""Pickles are read without importing or calling the names in them; malicious ones are rejected."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.errors import CheckpointError
from runtime.offline.convert import convert
from runtime.offline.convert.pickled import read_pickled
from runtime.offline.convert.stubs import tensors_of
from tests.runtime.offline.convert.samples import EVEN, Node, renamed, save_model, svd_llm
from tests.runtime.tiny import tiny_checkpoint


class Bomb:
    """An object that runs a command when the standard library unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_names_in_a_pickle_are_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({"model": Bomb(tmp_path / "ran"), "weights": torch.ones(3)}, path)
    content = read_pickled(path)
    assert torch.equal(content["weights"], torch.ones(3))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError):
        convert(path)
    assert not (tmp_path / "ran").exists()


def rewrite(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Change members of a zip file; ``change`` returns new content, or None to remove a member."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            if (new := change(name, data)) is not None:
                archive.writestr(name, new)


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: None if name.endswith("/data/0") else data,
        lambda name, data: data[:-4] if name.endswith("/data/0") else data,
        lambda name, data: data[: len(data) // 2] if name.endswith("data.pkl") else data,
        lambda name, data: None if name.endswith("data.pkl") else data,
        lambda name, data: b"big" if name.endswith("byteorder") else data,
        lambda name, data: pickle.dumps(3) if name.endswith("data.pkl") else data,
    ],
)
def test_damaged_pickles_are_refused(
    change: Callable[[str, bytes], bytes | None], tmp_path: Path
) -> None:
    expected = tiny_checkpoint(ranks=EVEN)
    save_model(expected, renamed(expected, svd_llm), tmp_path / "m.pt")
    rewrite(tmp_path / "m.pt", change)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "m.pt")


def test_tensors_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"x": torch.arange(10.0)[2:8]}, path)
    rewrite(
        path,
        lambda name, data: data.replace(b"K\x06\x85", b"K\x60\x85") if "pkl" in name else data,
    )
    with pytest.raises(CheckpointError, match="storage"):
        read_pickled(path)


def craft(path: Path, program: bytes, storage: bytes = b"", *, packed: bool = False) -> Path:
    """Write a torch file with the given pickle program and one storage."""
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", storage)
    return path


NESTED = b")" + b"\x85" * 100_000
"""A tuple in a tuple and so on, whose hash recurses without a bound."""


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02c__builtin__\nset\n](" + NESTED + b"e\x85R.",
        b"\x80\x02c__builtin__\nfrozenset\n](" + NESTED + b"e\x85R.",
        b"\x80\x02c__builtin__\ndict\n](" + NESTED + b"K\x01\x86e\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n](" + NESTED + b"K\x01\x86e\x85R.",
        b"\x80\x02}(" + b"(" + b"\x85" * 100_000 + b"K\x01u.",  # a key of nested tuples
        b"\x80\x02}\x8a\x09" + b"\xff" * 8 + b"\x00K\x01s.",  # a key above 2^48
        b"\x80\x02ctorch._utils\n_rebuild_parameter\n}X\x01\x00\x00\x00aK\x01sb.",  # BUILD
        b"\x80\x02K\x07)R.",  # call a number
        b"\x80\x02K\x07)\x81.",  # instantiate a number
        b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00lso.",  # OBJ
        b"(S'ls'\nios\nsystem\n.",  # INST
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02Pabc\n.",  # PERSID
        b"\x80\x02]K\x01K\x02s.",  # set an item of a list
        b"\x80\x02K\x01Q.",  # a number as persistent id
    ],
)
def test_malicious_pickles_are_refused_quickly(program: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read_pickled(craft(tmp_path / "x.pt", program))


def test_compressed_or_expanded_storages_are_refused(tmp_path: Path) -> None:
    expanded = torch.ones(4).expand(1000, 4)
    torch.save({"x": expanded}, tmp_path / "wide.pt")
    with pytest.raises(CheckpointError, match="more elements than its storage"):
        read_pickled(tmp_path / "wide.pt")
    torch.save({"x": torch.zeros(4)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        program = next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
    craft(tmp_path / "fine.pt", program, bytes(16))
    assert torch.equal(read_pickled(tmp_path / "fine.pt")["x"], torch.zeros(4))
    craft(tmp_path / "packed.pt", program, bytes(16), packed=True)
    with pytest.raises(CheckpointError, match="does not have 4 elements"):
        read_pickled(tmp_path / "packed.pt")


def test_tensors_are_memory_mapped(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    weights = [torch.full((1 << 22,), float(number)) for number in range(4)]
    torch.save({"weights": weights, "again": weights[1][5:9]}, path)
    before = anonymous_bytes()
    content = read_pickled(path)
    assert [float(weight.sum()) for weight in content["weights"]] == [0, 1 << 22, 1 << 23, 3 << 22]
    assert anonymous_bytes() - before < 16 << 20  # the weights have 64 MiB
    content["weights"][1][6] = 7.0
    assert content["again"].tolist() == [1, 7, 1, 1]
    assert read_pickled(path)["again"].tolist() == [1, 1, 1, 1]


def anonymous_bytes() -> int:
    """Return the memory of this process that is not backed by files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_storage_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"x": torch.full((100,), 3.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((100,), 3.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="another checksum"):
        read_pickled(path)


def test_module_that_contains_itself_is_refused(tmp_path: Path) -> None:
    model = Node()
    model.add_module("inner", model)
    torch.save({"model": model}, tmp_path / "m.pt")
    content = read_pickled(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        tensors_of(content["model"])
