"""KV formats by name: built-in formats, plug-ins, and rejected names."""

import sys
from types import ModuleType

import pytest
import torch

from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kv.dense import DenseFormat
from runtime.kv.registry import create_format
from runtime.models.model import Model
from tests.runtime.tiny import CONFIG, tiny_checkpoint


class Renamed(DenseFormat):
    """A format with another name, as a plug-in would define it."""

    name = "renamed"


class WithoutCreate:
    """A class without the factory `create`."""


class Incomplete:
    """A class with the factory `create`, but without the interface of a KV format."""

    name, version, kernels = "incomplete", 1, "none"

    @classmethod
    def create(cls, *_: object, by_halves: bool = False) -> "Incomplete":
        return cls()


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("kv_plug_in")
    for found in (Renamed, WithoutCreate, Incomplete):
        setattr(module, found.__name__, found)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def create(spec: str, config: ModelConfig = CONFIG) -> str:
    return create_format(spec, config, torch.device("cpu"), torch.float32).name


def test_dense_format_is_built_in() -> None:
    assert create("dense") == "dense"


def test_plug_in_is_imported_by_module_and_class(plug_in: str) -> None:
    assert create(f"{plug_in}:Renamed") == "renamed"
    model = Model(tiny_checkpoint(), kv_format=f"{plug_in}:Renamed")
    assert model.kv_format.name == "renamed"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp7", "unknown KV format 'fp7': expected dense"),
        ("no_such_module:Format", "cannot import 'no_such_module'"),
        (":Format", "cannot import ''"),
        ("kv_plug_in:NoSuchClass", "kv_plug_in has no 'NoSuchClass'"),
        ("kv_plug_in:", "kv_plug_in has no ''"),
        ("kv_plug_in:WithoutCreate", r"not a KV format: it has no create\(\)"),
        ("kv_plug_in:Incomplete", "not a KV format: it has no lossless, artifact_hash"),
    ],
)
def test_invalid_format_name_raises_a_specific_error(plug_in: str, spec: str, message: str) -> None:
    with pytest.raises(KVFormatError, match=message):
        create(spec)
