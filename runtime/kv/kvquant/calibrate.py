"""Codes of K and V, or of their latents, from sample pages."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import KVFormatError
from runtime.kv.calibration import Artifact, KVMoments
from runtime.kv.calibration.moments import SKIPPED
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.fdc.format import FdcLayer
from runtime.kv.kvquant.codes import (
    BITS,
    MAX_OUTLIERS,
    MAX_WIDTH,
    NAME,
    WIDTH_MULTIPLE,
    VectorCode,
)
from runtime.kv.kvquant.exact import ExactPages
from runtime.kv.kvquant.levels import LEVELS, fit_levels

VERSION = 1
LATENT_FORMATS = "fdc", "palu"
"""Formats whose latents can be quantized."""
OPTION = "kvquant"
"""Key under which the options of an artifact contain those of the codes."""
_ROPE = "after", "before"
_LEAST_SCALE = 1e-12
_POSITIONS = 4
"""Number of positions over which the importance of K is averaged."""
_ROUNDS = 3
"""Number of fits of the levels of K. Each ignores the outliers of the previous fit."""


@dataclass(frozen=True)
class CodeOptions:
    """Options of the codes.

    Attributes:
        bits: bits of a code, 4 or 3.
        k_outliers, v_outliers: number of exact elements per token and head of K and of V.
        levels: "kmeans" for non-uniform levels per layer, or "uniform".

    Raises:
        KVFormatError: an option is out of range.
    """

    bits: int = 4
    k_outliers: int = 2
    v_outliers: int = 0
    levels: str = "kmeans"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise KVFormatError(f"codes of {self.bits} bits: choose {' or '.join(map(str, BITS))}")
        for count in (self.k_outliers, self.v_outliers):
            if not 0 <= count <= MAX_OUTLIERS:
                raise KVFormatError(
                    f"{count} outliers per token and head: expected 0 to {MAX_OUTLIERS}"
                )
        if self.levels not in LEVELS:
            raise KVFormatError(f"levels {self.levels!r} are unknown: choose {' or '.join(LEVELS)}")


@dataclass(frozen=True)
class KvQuantOptions(CodeOptions):
    """Options of format `kvquant`.

    Attributes:
        rope: whether K is quantized "after" or "before" RoPE.
    """

    rope: str = "after"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope not in _ROPE:
            raise KVFormatError(f"rope {self.rope!r} is unknown: choose {' or '.join(_ROPE)}")


def calibrate(
    layers: Iterable[KVMoments],
    options: KvQuantOptions,
    model_hash: str,
    config: ModelConfig,
    device: torch.device | str = "cpu",
) -> Artifact:
    """Compute the codes of K and V.

    Args:
        layers: moments of each layer with sample pages, in order.
        config: configuration of the model, for RoPE.
        device: device of the moments.

    Returns:
        Artifact with the tensors of `code_tensors`.

    Raises:
        KVFormatError: there are no sample pages, or the format does not support the model.
    """
    pages = ExactPages(config, device, before_rope=options.rope == "before")
    tensors = code_tensors(layers, pages, options)
    return Artifact(NAME, VERSION, model_hash, asdict(options), tensors)


def quantize_latents(
    artifact: Artifact,
    latents: CompressedFormat,
    layers: Iterable[KVMoments],
    options: CodeOptions,
) -> Artifact:
    """Return a calibration of the same format that also quantizes its latents.

    Args:
        artifact: calibration of a format of `LATENT_FORMATS`.
        latents: the format with this calibration.
        layers: moments of each layer with sample pages, in order.

    Raises:
        KVFormatError: there are no sample pages, or the widths of the latents are not supported.
    """
    check_quantizable(latents.name)
    return replace(
        artifact,
        format=quantized_name(latents.name),
        version=quantized_version(latents.version),
        options={**artifact.options, OPTION: asdict(options)},
        tensors={**artifact.tensors, **code_tensors(layers, latents, options)},
    )


def quantized_name(name: str) -> str:
    """Return the name of a format with quantized latents."""
    return f"{name}+{NAME}"


def quantized_version(version: int) -> int:
    """Return the version of a format with quantized latents; it includes that of the codes."""
    return 100 * version + VERSION


def unquantized_version(version: int) -> int:
    """Return the version of a format without quantization: the inverse of `quantized_version`."""
    return version // 100


def check_quantizable(name: str) -> None:
    """Check that a format stores latents that can be quantized.

    Raises:
        KVFormatError: the format stores none.
    """
    if name not in LATENT_FORMATS:
        raise KVFormatError(
            f"KV format {name} cannot be quantized again: only {' and '.join(LATENT_FORMATS)} "
            f"store latents in bf16; --kv-format {NAME} quantizes K and V themselves"
        )


def code_tensors(
    layers: Iterable[KVMoments], latents: CompressedFormat, options: CodeOptions
) -> dict[str, Tensor]:
    """Compute the codes of all layers.

    Args:
        layers: moments of each layer with sample pages, in order.
        latents: format with the bf16 planes that are quantized, K and V.

    Returns:
        For each of K and V, with ``side`` "k" or "v": fp32 ``<side>_code.<layer>`` ``[3, kv_heads,
        width]``, the attributes mean, scale and weight of `VectorCode`, and fp32
        ``<side>_levels.<layer>`` ``[2 ** bits]``.
    """
    tensors: dict[str, Tensor] = {}
    for index, moments in enumerate(layers):
        if not moments.sample_pages:
            raise KVFormatError(f"layer {index}: no pages were kept to quantize")
        layer = by_channel(latents.layer(index))
        parts = [torch.cat(x) for x in zip(*moments.sample_pages, strict=True)]
        samples = _latents(layer, latents, index, *parts)
        for x in samples:
            check_width(latents.name, x.shape[3])
        gains = _gains(layer, moments, parts[2], *(x.shape[3] for x in samples))
        for side, x, gain in zip(("k", "v"), samples, gains, strict=True):
            code = _code(side, x.transpose(0, 1).flatten(1, 2), gain, options)
            parameters = torch.stack((code.mean, code.scale, code.weight))
            tensors[f"{side}_code.{index}"] = parameters.cpu()
            tensors[f"{side}_levels.{index}"] = code.levels.cpu()
    return tensors


def by_channel(layer: CompressedLayer) -> CompressedLayer:
    """Return a layer whose compressed planes have one channel in each column, for all heads.

    `fdc` may pack the rows of heads whose rank is below the width of the plane.
    """
    if not isinstance(layer, FdcLayer):
        return layer
    (heads, _, k_width), v_width = layer.k_basis.shape, layer.v_basis.shape[2]
    return replace(layer, k_ranks=(k_width,) * heads, v_ranks=(v_width,) * heads)


def check_width(name: str, width: int) -> None:
    """Check that vectors of ``width`` elements can be coded.

    Raises:
        KVFormatError: the width is not a multiple of `WIDTH_MULTIPLE`, or is above `MAX_WIDTH`.
    """
    if width % WIDTH_MULTIPLE or not 0 < width <= MAX_WIDTH:
        raise KVFormatError(
            f"KV format {name} needs heads of a multiple of {WIDTH_MULTIPLE} dimensions up to "
            f"{MAX_WIDTH}, not {width}"
        )


def _latents(
    layer: CompressedLayer,
    latents: CompressedFormat,
    index: int,
    keys: Tensor,
    values: Tensor,
    first_positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the stored K and V of pages, fp32 ``[p, kv_heads, 16, width]``."""
    planes = tuple(
        torch.empty(len(keys), *plane.shape, dtype=plane.dtype, device=keys.device)
        for plane in latents.planes(index, keys.shape[2])
    )
    pages = torch.arange(len(keys), device=keys.device)
    layer.encode(keys, values, first_positions, planes, pages)
    k, v = (plane.float() for plane in planes)
    return k, v


def _gains(
    layer: CompressedLayer,
    moments: KVMoments,
    first_positions: Tensor,
    k_width: int,
    v_width: int,
) -> tuple[Tensor, Tensor]:
    """Return the mean squared change of scores, and of V, for a unit change of each channel.

    For each channel of each head, a page is decoded in which only this channel is 1. The squared
    change of scores is the mean over queries and over some positions, summed over the heads that
    the channel affects.

    Returns:
        fp32 ``[kv_heads, k_width]`` and ``[kv_heads, v_width]``.
    """
    kv_heads = len(moments.queries)
    device = moments.queries.device
    queries = moments.queries / moments.tokens

    def one_hot(width: int, of: int) -> Tensor:
        channels = torch.zeros(of, kv_heads, SKIPPED, width, device=device)
        at = torch.arange(kv_heads * width, device=device)
        channels[at, at // width, :, at % width] = 1.0
        return channels

    count = kv_heads * max(k_width, v_width)
    planes = (one_hot(k_width, count), one_hot(v_width, count))
    pages = torch.arange(count, device=device)
    k_gain: Tensor = torch.zeros(count, dtype=torch.float64, device=device)
    ordered = first_positions.sort().values
    for part in range(_POSITIONS):
        first = ordered[len(ordered) * part // _POSITIONS].expand(count)
        keys, values = (x.double() for x in layer.decode(planes, pages, first))
        k_gain += torch.einsum("phnd,hde,phne->p", keys, queries, keys) / (_POSITIONS * SKIPPED)
    v_gain = values.square().sum((1, 3)).mean(1)
    return (
        k_gain[: kv_heads * k_width].view(kv_heads, k_width).float(),
        v_gain[: kv_heads * v_width].view(kv_heads, v_width).float(),
    )


def _code(side: str, samples: Tensor, gains: Tensor, options: CodeOptions) -> VectorCode:
    """Return the code of one layer's K or V.

    Args:
        samples: fp32 ``[kv_heads, n, width]``.
        gains: fp32 ``[kv_heads, width]``, importance of squared errors.
    """
    deviation, mean = torch.std_mean(samples.double(), dim=1, correction=0)
    # A channel without variation must not dominate the scales of tokens once it varies.
    scale = deviation.clamp_min(_LEAST_SCALE).maximum(deviation.amax(1, keepdim=True) * 1e-3)
    weight = scale * gains.double().sqrt()
    by_token = side == "v"
    mean, scale, weight = (x.float() for x in (mean, scale, weight))
    levels = torch.zeros(2**options.bits, device=samples.device)
    outliers = options.v_outliers if by_token else options.k_outliers
    code = VectorCode(mean, scale, weight, levels, outliers, by_token)
    for _ in range(1 if by_token else _ROUNDS):
        found = code.analyze(samples[None])
        kept = torch.ones_like(found.z, dtype=torch.bool).scatter(-1, found.outliers, False)
        errors = (code.weight[:, None] * found.scale.float()).square().expand_as(found.z)
        fitted = fit_levels(found.z[kept], errors[kept], len(levels), options.levels)
        code = replace(code, levels=fitted)
    return code
