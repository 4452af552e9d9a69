"""Calibration of KV formats: second moments of activations, bases, and artifact files."""

from runtime.kv.calibration.artifact import Artifact
from runtime.kv.calibration.bases import RankChoice, spectral_basis, truncated_basis
from runtime.kv.calibration.format import CalibratedFormat
from runtime.kv.calibration.moments import KVMoments

__all__ = [
    "Artifact",
    "CalibratedFormat",
    "KVMoments",
    "RankChoice",
    "spectral_basis",
    "truncated_basis",
]
