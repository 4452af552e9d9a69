"""Calibrations of the tiny model for tests of engines and workers."""

from dataclasses import asdict
from pathlib import Path

import torch

from runtime.kv import fdc, kvquant, palu, shard
from runtime.kv.calibration import Artifact, KVMoments
from runtime.offline.compress.kv_moments import kv_moments
from tests.runtime.tiny import CONFIG, tiny_checkpoint

QUANTIZED = "kvquant", "fdc", "palu"
"""Formats that `quantized_calibration` makes; the latents of `fdc` and `palu` are quantized."""


def tiny_moments(seed: int = 0) -> list[KVMoments]:
    """Return moments of the tiny model on random tokens, with all pages as samples."""
    tokens = torch.randint(
        CONFIG.vocab_size, (4, 160), generator=torch.Generator().manual_seed(seed)
    )
    return list(kv_moments(tiny_checkpoint(), tokens, min_sample_pages=100))


def quantized_calibration(name: str, codes: kvquant.CodeOptions | None = None) -> Artifact:
    """Return a calibration of one of `QUANTIZED` for the tiny model."""
    moments = tiny_moments()
    codes = codes or kvquant.CodeOptions(bits=3)
    model_hash = tiny_checkpoint().model_hash
    if name == "kvquant":
        options = kvquant.KvQuantOptions(**asdict(codes))
        return kvquant.calibrate(moments, options, model_hash, CONFIG)
    if name == "fdc":
        artifact = fdc.calibrate(moments, fdc.FdcOptions(rank=16), model_hash)
        return kvquant.quantize_latents(artifact, fdc.FdcFormat(CONFIG, artifact), moments, codes)
    artifact = palu.calibrate(moments, palu.PaluOptions(rank=16), model_hash)
    return kvquant.quantize_latents(artifact, palu.PaluFormat(CONFIG, artifact), moments, codes)


def shard_calibration() -> Artifact:
    """Return a calibration of `shard` for the tiny model."""
    return shard.calibrate(tiny_moments(), shard.ShardOptions(), tiny_checkpoint().model_hash)


def calibrated_spec(name: str, folder: Path) -> str:
    """Write a calibration of a format of `CALIBRATED`, and return the name of the format."""
    if name != "shard":
        return quantized_spec(name, folder)
    path = folder / "shard.safetensors"
    shard_calibration().save(path)
    return f"shard:{path}"


def quantized_spec(name: str, folder: Path) -> str:
    """Write a calibration of one of `QUANTIZED`, and return the name of its format."""
    path = folder / f"{name}.safetensors"
    quantized_calibration(name).save(path)
    return f"{name}:{path}"
