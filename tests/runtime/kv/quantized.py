"""Calibrations of kvquant, and of quantized latents, for random activations."""

from functools import cache

import torch
from torch import Tensor

from runtime.kv import fdc, kvquant, palu
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.compressed import CompressedFormat
from runtime.kv.registry import CALIBRATED, from_artifact
from runtime.kv.rotation import PageRotation
from tests.runtime.kv.lowrank import (
    CONFIG,
    PAGE,
    activations,
    orthonormal,
    pages_of,
)

HASH = "model"
NAMES = "kvquant", "kvquant-before", "fdc", "palu"
"""Formats; in the second one, K is quantized before RoPE."""


def text(seed: int = 0, tokens: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v with means, decaying spectra and some large elements."""
    generator = torch.Generator().manual_seed(seed)

    def part(heads: int, at: int) -> Tensor:
        x = activations(orthonormal(heads, 64, 64, seed=heads), seed + at, tokens)
        large = torch.rand(x.shape, generator=generator) < 0.005
        return torch.where(large, 20.0, x * torch.linspace(3, 0.1, 64) + 0.2)

    return part(8, 0), part(4, 1), part(4, 2)


@cache
def moments() -> list[KVMoments]:
    """Return moments of `text` for 2 layers, with all pages as samples."""
    found = KVMoments.of(CONFIG, page_every=1)
    q, k, v = (torch.cat((x[:, :PAGE], x), 1)[None] for x in text())
    found.add(q, k, v, PageRotation(CONFIG))
    return [found] * 2


@cache
def calibration(name: str, **options: int | str) -> Artifact:
    """Return the calibration of one of `NAMES`."""
    kind, _, before = name.partition("-")
    if kind == "kvquant":
        rope = {"rope": "before"} if before else {}
        chosen = kvquant.KvQuantOptions(**options, **rope)  # type: ignore[arg-type]
        return kvquant.calibrate(moments(), chosen, HASH, CONFIG)
    made = (
        fdc.calibrate(moments(), fdc.FdcOptions(rank=48), HASH)
        if kind == "fdc"
        else palu.calibrate(moments(), palu.PaluOptions(rank=48), HASH)
    )
    codes = kvquant.CodeOptions(**options)  # type: ignore[arg-type]
    return kvquant.quantize_latents(
        made, CALIBRATED[kind](CONFIG, made, "", "cpu"), moments(), codes
    )


def create(name: str, **options: int | str) -> CompressedFormat:
    return from_artifact(name.partition("-")[0], calibration(name, **options), CONFIG, HASH)


def held_out(pages: int = 16) -> tuple[Tensor, Tensor]:
    _, k, v = text(seed=50)
    return pages_of(k)[:pages], pages_of(v)[:pages]
