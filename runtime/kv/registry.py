"""KV formats by name: built-in formats, calibrated ones and plug-ins.

``name:PATH`` names a calibrated format and its calibration, ``module:Class`` a plug-in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.weights import Checkpoint, layer_shapes
from runtime.config import ModelConfig
from runtime.errors import CalibrationError, KVFormatError
from runtime.kv.calibration import Artifact
from runtime.kv.compressed import CompressedFormat
from runtime.kv.dense import DenseFormat
from runtime.kv.fdc import FdcFormat
from runtime.kv.format import KVFormat, KVFormatFactory, LayerKV, Plane, sliding_window
from runtime.kv.fp8 import FP8Format
from runtime.kv.int4 import Int4Format
from runtime.kv.k4v2 import K4V2Format
from runtime.kv.kvquant import KvQuantFormat, quantized_format, quantized_name
from runtime.kv.lowrank import LowRankFormat
from runtime.kv.names import DENSE, LOWRANK, check_name, is_calibrated
from runtime.kv.palu import PaluFormat
from runtime.kv.shard import ShardFormat
from runtime.kv.stream import StreamFormat
from runtime.kv.windowed import WindowedFormat
from runtime.pages.plan import PAGE_SIZE

COMPRESSED: dict[str, Callable[[ModelConfig], CompressedFormat]] = {
    "fp8": FP8Format,
    "fp8-e5m2": partial(FP8Format, dtype=torch.float8_e5m2),
    "int4": Int4Format,
    "k4v2": K4V2Format,
    "stream8": partial(StreamFormat, bits=8),
    "stream4": partial(StreamFormat, bits=4),
    "stream4-qjl": partial(StreamFormat, bits=4, qjl=True),
}
"""Compressed formats by name. `create_format` combines them with the pages of `dense`."""


CALIBRATED: dict[
    str, Callable[[ModelConfig, Artifact, str, torch.device | str], CompressedFormat]
] = {
    FdcFormat.name: FdcFormat,
    PaluFormat.name: PaluFormat,
    ShardFormat.name: ShardFormat,
    KvQuantFormat.name: KvQuantFormat,
}
"""Compressed formats that read a calibration, by name. In ``name:PATH``, PATH is the file.

Arguments are those of `runtime.kv.calibration.CalibratedFormat`.
`from_artifact` also creates the variants of `fdc` and `palu` with quantized latents.
"""

_MEMBERS = (
    *("name", "version", "artifact_hash", "graph_safe", "dense_bf16"),
    *("kernels", "planes", "layer"),
)
"""Members of `KVFormat` that a plug-in must have."""


class PlainFormat(KVFormat):
    """Wrapper of a plug-in that does not extend `KVFormat`; adds defaults of optional attributes.

    Args:
        own: an object with the members `_MEMBERS`.
    """

    def __init__(self, own: KVFormat) -> None:
        self._own = own
        self.name = own.name
        self.version = own.version
        self.artifact_hash = own.artifact_hash
        self.graph_safe = own.graph_safe
        self.dense_bf16 = own.dense_bf16
        self.keeps_rope = getattr(own, "keeps_rope", None)

    @property
    def kernels(self) -> str:
        return self._own.kernels

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        return self._own.planes(layer, page_size)

    def layer(self, index: int) -> LayerKV:
        return self._own.layer(index)


def create_format(
    spec: str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    by_halves: bool = False,
    model_hash: str = "",
    layers: Sequence[Any] = (),
) -> KVFormat:
    """Create the KV format with a given name.

    Args:
        spec: a built-in name; ``name:PATH`` for a format of `CALIBRATED` and its calibration; or
            ``module:Class`` for a class with a ``create`` classmethod.
            `runtime.kv.format.KVFormatFactory` documents ``create`` and the other arguments.
        model_hash: hash of the model that a calibration must belong to; empty to accept a
            calibration of any model.
        layers: layers of the model, of which only shapes are read. `LowRankFormat` needs them.

    Raises:
        CalibrationError: the calibration is missing or malformed, or is for another model.
        KVFormatError: the name is unknown, the module or class is missing, the class is not a KV
            format, or the format does not support the model.
    """
    check_name(spec)
    calibrated = is_calibrated(spec)
    if calibrated or ":" not in spec:
        dense = DenseFormat.create(config, device, dtype, by_halves=by_halves)
        if spec == DENSE:
            return dense
        if spec == LOWRANK:
            return LowRankFormat(config, dense, layers, device, dtype, by_halves=by_halves)
        if calibrated:
            return WindowedFormat(dense, calibrated_format(spec, config, model_hash, device))
        return WindowedFormat(dense, COMPRESSED[spec](config))
    kv_format = _plug_in(spec)(config, device, dtype, by_halves=by_halves)
    if isinstance(kv_format, KVFormat):
        return kv_format
    missing = [member for member in _MEMBERS if not hasattr(kv_format, member)]
    if missing:
        raise KVFormatError(f"{spec} is not a KV format: it has no {', '.join(missing)}")
    return PlainFormat(kv_format)


def format_of(
    spec: str,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    by_halves: bool = False,
) -> KVFormat:
    """Create the KV format of a model; for the arguments and errors, see `create_format`.

    Raises:
        KVFormatError: the format does not support the sliding windows of the model.
    """
    config = checkpoint.config
    chosen = create_format(
        spec,
        config,
        device,
        dtype,
        by_halves=by_halves,
        model_hash=checkpoint.model_hash,
        layers=layer_shapes(checkpoint),
    )
    _check_windows(chosen, config)
    return chosen


def _check_windows(kv_format: KVFormat, config: ModelConfig) -> None:
    """Raise `KVFormatError` if a format does not support the sliding windows of a model.

    A format supports the window of a layer if its planes are in the page group returned by
    `sliding_window`.
    """
    for layer in range(config.num_layers):
        window = config.window(layer)
        group = kv_format.planes(layer, PAGE_SIZE)[0].group
        if window is not None and group != sliding_window(window):
            raise KVFormatError(f"KV format {kv_format.name} does not support sliding windows")


def calibrated_format(
    spec: str, config: ModelConfig, model_hash: str = "", device: torch.device | str = "cpu"
) -> CompressedFormat:
    """Read the calibration of a format.

    Args:
        spec: ``name:PATH``, where `is_calibrated` is true.
        model_hash: as in `create_format`.

    Raises:
        CalibrationError: the calibration is not named, missing or malformed, or is for another
            model.
        KVFormatError: the format does not support the model.
    """
    check_name(spec)
    name, _, path = spec.partition(":")
    artifact = Artifact.load(Path(path))
    try:
        return from_artifact(name, artifact, config, model_hash, device)
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from error


def from_artifact(
    name: str,
    artifact: Artifact,
    config: ModelConfig,
    model_hash: str = "",
    device: torch.device | str = "cpu",
) -> CompressedFormat:
    """Create a format from a calibration, with quantized latents if the calibration has codes.

    Args:
        name: key of `CALIBRATED`.
        model_hash: as in `create_format`.

    Raises:
        CalibrationError: the calibration is for another format or model, or is malformed.
        KVFormatError: the format does not support the model.
    """
    create = CALIBRATED[name]
    if artifact.format == quantized_name(name):
        return quantized_format(name, create, config, artifact, model_hash, device)
    return create(config, artifact, model_hash, device)


def _plug_in(spec: str) -> KVFormatFactory:
    module_name, _, class_name = spec.partition(":")
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise KVFormatError(f"KV format {spec}: cannot import {module_name!r}: {error}") from error
    found: Any = getattr(module, class_name, None)
    if found is None:
        raise KVFormatError(f"KV format {spec}: {module_name} has no {class_name!r}")
    factory: KVFormatFactory | None = getattr(found, "create", None)
    if not callable(factory):
        raise KVFormatError(f"{spec} is not a KV format: it has no create()")
    return factory
