"""Names of KV formats. This module imports no format, which would take seconds."""

import sys
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import CalibrationError, KVFormatError

DENSE = "dense"
LOWRANK = "lowrank"
"""Format of the latents of a factorized model; its bases are weights of the model."""
COMPRESSED = ("fp8", "fp8-e5m2", "int4", "k4v2", "stream8", "stream4", "stream4-qjl")
"""Compressed formats without a calibration."""
CALIBRATED = ("fdc", "palu", "shard", "kvquant")
"""Compressed formats that read a calibration: ``name:PATH``."""


def is_calibrated(spec: str) -> bool:
    """Return whether ``spec`` names a format of `CALIBRATED`, with or without a calibration."""
    return spec.partition(":")[0] in CALIBRATED


def check_name(spec: str) -> None:
    """Check the name of a KV format, as far as this is possible without loading it.

    Raises:
        CalibrationError: the format needs a calibration, and none is named or the file is missing.
        KVFormatError: there is no format or package of this name.
    """
    name, colon, rest = spec.partition(":")
    if is_calibrated(spec):
        _check_calibration(name, rest)
    elif not colon and name not in (DENSE, LOWRANK, *COMPRESSED):
        calibrated = (f"{each}:PATH" for each in CALIBRATED)
        known = ", ".join((DENSE, LOWRANK, *sorted(COMPRESSED), *calibrated))
        raise KVFormatError(f"unknown KV format {spec!r}: expected {known} or module:Class")
    elif colon:
        package = name.partition(".")[0]
        if not package or (package not in sys.modules and find_spec(package) is None):
            raise KVFormatError(f"KV format {spec}: cannot import {name!r}")


def _check_calibration(name: str, path: str) -> None:
    if not path:
        raise CalibrationError(
            f"KV format {name} needs a calibration: create it with `headrace calibrate "
            f"--kv-format {name} --out FILE`, then pass {name}:FILE"
        )
    if not Path(path).is_file():
        raise CalibrationError(
            f"there is no calibration of KV format {name} at {path}: create it with `headrace "
            f"calibrate --kv-format {name} --out {path}`"
        )
