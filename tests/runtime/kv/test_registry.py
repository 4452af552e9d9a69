"""KV formats by name: built-in formats, plug-ins, and rejected names."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from runtime.config import ModelConfig
from runtime.errors import CalibrationError, KVFormatError
from runtime.kv import fdc
from runtime.kv.calibration import KVMoments
from runtime.kv.compressed import COMPRESSED
from runtime.kv.dense import DenseFormat
from runtime.kv.format import KVFormat, Plane
from runtime.kv.registry import create_format
from runtime.models.build import build_model
from runtime.offline.quality.formats import format_factory
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


class Plain:
    """A format whose class does not extend `KVFormat`."""

    name, version, artifact_hash, kernels = "plain", 3, "hash", "none-1"
    graph_safe, dense_bf16 = True, False

    @classmethod
    def create(cls, *_: object, by_halves: bool = False) -> "Plain":
        return cls()

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        return (Plane(f"plane{layer}", torch.bfloat16, (2, page_size, 4)),)

    def layer(self, index: int) -> int:
        return index


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("kv_plug_in")
    for found in (Renamed, WithoutCreate, Incomplete, Plain):
        setattr(module, found.__name__, found)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def create(spec: str, config: ModelConfig = CONFIG) -> str:
    return create_format(spec, config, torch.device("cpu"), torch.float32).name


def test_dense_format_is_built_in() -> None:
    assert create("dense") == "dense"


def test_plug_in_is_imported_by_module_and_class(plug_in: str) -> None:
    assert create(f"{plug_in}:Renamed") == "renamed"
    model = build_model(tiny_checkpoint(), kv_format=f"{plug_in}:Renamed")
    assert model.kv_format.name == "renamed"


def test_plain_class_gets_the_defaults_of_optional_attributes(plug_in: str) -> None:
    made = create_format(f"{plug_in}:Plain", CONFIG, torch.device("cpu"), torch.float32)
    assert isinstance(made, KVFormat)
    assert (made.name, made.version, made.artifact_hash) == ("plain", 3, "hash")
    assert (made.graph_safe, made.dense_bf16, made.keeps_rope) == (True, False, None)
    assert made.kernels == "none-1"
    assert [plane.name for plane in made.planes(2, 16)] == ["plane2"]
    layer: object = made.layer(5)
    assert layer == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp7", "unknown KV format 'fp7': expected dense"),
        ("no_such_module:Format", "cannot import 'no_such_module'"),
        (":Format", "cannot import ''"),
        ("kv_plug_in:NoSuchClass", "kv_plug_in has no 'NoSuchClass'"),
        ("kv_plug_in:", "kv_plug_in has no ''"),
        ("kv_plug_in:WithoutCreate", r"not a KV format: it has no create\(\)"),
        ("kv_plug_in:Incomplete", "not a KV format: it has no artifact_hash"),
    ],
)
def test_invalid_format_name_raises_a_specific_error(plug_in: str, spec: str, message: str) -> None:
    with pytest.raises(KVFormatError, match=message):
        create(spec)


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """A calibration of `fdc` for the tiny model with the hash ``tiny-0``."""
    moments = KVMoments.of(CONFIG)
    moments.queries += torch.eye(CONFIG.head_dim)
    moments.values += torch.eye(CONFIG.head_dim)
    path = tmp_path / "fdc.safetensors"
    fdc.calibrate([moments] * CONFIG.num_layers, fdc.FdcOptions(), "tiny-0").save(path)
    return path


def test_name_and_path_create_a_calibrated_format(calibration: Path) -> None:
    model = build_model(tiny_checkpoint(), kv_format=f"fdc:{calibration}")
    assert model.kv_format.name == "fdc"
    made = fdc.FdcFormat.load(calibration, CONFIG)
    assert model.kv_format.artifact_hash == made.artifact_hash
    stored = [plane.name for _, plane in model.layout.planes if plane.group == COMPRESSED]
    assert stored == ["k_stored", "v_stored"] * CONFIG.num_layers


def test_calibration_of_another_model_is_refused(calibration: Path) -> None:
    """The hash is compared if it is known, otherwise the shapes are."""
    spec = f"fdc:{calibration}"
    with pytest.raises(CalibrationError, match=rf"{calibration}: .* tiny-0, not to tiny-1"):
        build_model(tiny_checkpoint(seed=1), kv_format=spec)
    with pytest.raises(CalibrationError, match="tiny-0, not to other"):
        format_factory(spec)(CONFIG, "other")
    assert format_factory(spec)(CONFIG) is not None
    with pytest.raises(CalibrationError, match="2 layers, but this model 3"):
        create(spec, replace(CONFIG, num_layers=3))
    with pytest.raises(CalibrationError, match="but this model needs"):
        create(spec, replace(CONFIG, head_dim=32))


def test_calibration_of_another_version_or_format_is_refused(
    calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CalibrationError, match=r"is of KV format fdc version .*, not of palu"):
        create(f"palu:{calibration}")
    monkeypatch.setattr(fdc.FdcFormat, "version", 99)
    with pytest.raises(CalibrationError, match="not of fdc version 99: calibrate again"):
        create(f"fdc:{calibration}")


def test_missing_calibration_error_has_the_command(tmp_path: Path) -> None:
    for spec in ("fdc", "fdc:"):
        with pytest.raises(CalibrationError, match="headrace calibrate --kv-format fdc"):
            create(spec)
    with pytest.raises(CalibrationError, match=r"no calibration .*missing.*`headrace calibrate"):
        create(f"fdc:{tmp_path}/missing")
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(CalibrationError, match="bad is not a calibration"):
        create(f"shard:{tmp_path}/bad")
