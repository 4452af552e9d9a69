"""Compressed pages with quantized K and V, or quantized latents, in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import CalibrationError
from runtime.kv.calibration import Artifact
from runtime.kv.compressed import CompressedFormat, CompressedLayer
from runtime.kv.format import Plane
from runtime.kv.kvquant.calibrate import (
    OPTION,
    VERSION,
    by_channel,
    check_quantizable,
    check_width,
    quantized_name,
    quantized_version,
    unquantized_version,
)
from runtime.kv.kvquant.codes import BITS, MAX_OUTLIERS, NAME, Coded, VectorCode
from runtime.kv.kvquant.exact import ExactPages


@dataclass(frozen=True)
class QuantizedLayer(CompressedLayer):
    """Quantizes the K and V that another layer stores.

    Attributes:
        latents: layer with two bf16 planes, K and V, that are quantized.
        keys: code of K, without scales of tokens.
        values: code of V, with scales of tokens.
    """

    latents: CompressedLayer
    keys: VectorCode
    values: VectorCode

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        k, v = (
            keys.new_empty(*keys.shape[:3], code.width, dtype=torch.bfloat16)
            for code in (self.keys, self.values)
        )
        pages = torch.arange(len(keys), device=keys.device)
        self.latents.encode(keys, values, first_positions, (k, v), pages)
        finite = (k.isfinite().all(-1) & v.isfinite().all(-1)).unsqueeze(-1)
        k_coded, v_coded = (
            code.encode(torch.where(finite, x.float(), 0.0))
            for code, x in ((self.keys, k), (self.values, v))
        )
        # A NaN that is converted from fp32 would have other bits on a GPU than on a CPU.
        scales = v_coded.scale.masked_fill(~finite, torch.nan)
        parts = [k_coded.codes, v_coded.codes, scales]
        if self.keys.outliers + self.values.outliers:
            parts.append(torch.cat((k_coded.outliers, v_coded.outliers), dim=-1))
            parts.append(torch.cat((k_coded.indices, v_coded.indices), dim=-1))
        for plane, part in zip(planes, parts, strict=True):
            plane[targets] = part

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        k_codes, v_codes, scales, *exact = (plane[pages] for plane in planes)
        if not exact:
            exact = [scales[..., :0], k_codes[..., :0]]
        count = self.keys.outliers
        (k_exact, v_exact), (k_at, v_at) = ((x[..., :count], x[..., count:]) for x in exact)
        ones = torch.ones_like(scales)
        k = self.keys.decode(Coded(k_codes, ones, k_exact, k_at))
        v = self.values.decode(Coded(v_codes, scales, v_exact, v_at))
        finite = ~scales.isnan()
        k, v = (torch.where(finite, x, torch.nan) for x in (k, v))
        return self.latents.decode(
            (k, v), torch.arange(len(pages), device=k.device), first_positions
        )


class QuantizedPages(CompressedFormat):
    """Quantizes the planes of another format.

    Args:
        latents: format whose layers have two bf16 planes, K and V.
        artifact: calibration with the tensors of `runtime.kv.kvquant.calibrate.code_tensors`.

    Raises:
        CalibrationError: a tensor is missing or does not fit the model.
        KVFormatError: the format does not support the model.
    """

    def __init__(
        self,
        name: str,
        version: int,
        latents: CompressedFormat,
        artifact: Artifact,
        config: ModelConfig,
        device: torch.device | str,
    ) -> None:
        self.name = name
        self.version = version
        self.artifact_hash = artifact.hash
        self.keeps_rope = latents.keeps_rope
        self._heads = config.num_kv_heads
        artifact.check_layers(config.num_layers, "k_code")
        options = artifact.options.get(OPTION, artifact.options)
        outliers = {side: options.get(f"{side}_outliers") for side in "kv"}
        for count in outliers.values():
            if type(count) is not int or not 0 <= count <= MAX_OUTLIERS:
                raise CalibrationError(f"calibration of {name}: {count!r} outliers are impossible")
        self._layers = []
        for index in range(config.num_layers):
            layer = by_channel(latents.layer(index))
            codes = [
                _read_code(artifact, plane, index, outliers[plane.name], config, device)
                for plane in latents.planes(index, 1)
            ]
            self._layers.append(QuantizedLayer(layer, *codes))

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        found = self._layers[layer]
        outliers = found.keys.outliers + found.values.outliers

        def plane(name: str, dtype: torch.dtype, dim: int) -> Plane:
            return Plane(name, dtype, (self._heads, page_size, dim), encodable=False)

        planes = (
            plane("k", torch.uint8, found.keys.width * found.keys.bits // 8),
            plane("v", torch.uint8, found.values.width * found.values.bits // 8),
            plane("v_scale", torch.bfloat16, 1),
        )
        if not outliers:
            return planes
        return (
            *planes,
            plane("outlier", torch.bfloat16, outliers),
            plane("outlier_index", torch.uint8, outliers),
        )

    def layer(self, index: int) -> QuantizedLayer:
        """Return the encoding of one layer."""
        return self._layers[index]

    def describe(self, layer: int) -> str:
        """Return the bits and outliers of one layer as text."""
        found = self._layers[layer]
        widths = ", ".join(
            f"{side} {code.width} x {code.bits} bits"
            for side, code in (("K", found.keys), ("V", found.values))
        )
        return f"{widths}, outliers {found.keys.outliers} + {found.values.outliers}"


class KvQuantFormat(QuantizedPages):
    """Format `kvquant`; artifacts are results of `runtime.kv.kvquant.calibrate`."""

    name = NAME
    version = VERSION

    def __init__(
        self,
        config: ModelConfig,
        artifact: Artifact,
        model_hash: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        artifact.check(self.name, self.version, model_hash)
        check_width(self.name, config.head_dim)
        before_rope = artifact.options.get("rope") == "before"
        pages = ExactPages(config, device, before_rope=before_rope)
        super().__init__(self.name, self.version, pages, artifact, config, device)


def quantized_format(
    name: str,
    create: Callable[[ModelConfig, Artifact, str, torch.device | str], CompressedFormat],
    config: ModelConfig,
    artifact: Artifact,
    model_hash: str = "",
    device: torch.device | str = "cpu",
) -> QuantizedPages:
    """Create a format of `LATENT_FORMATS` with quantized latents.

    Args:
        name: name of the format without quantization.
        create: creates the format without quantization.
        artifact: result of `runtime.kv.kvquant.calibrate.quantize_latents`.
        model_hash: hash of the model to be served; empty to skip the comparison.

    Raises:
        CalibrationError: the calibration is for another version or model, or is malformed.
        KVFormatError: the latents of this format cannot be quantized.
    """
    check_quantizable(name)
    version = unquantized_version(artifact.version)
    artifact.check(quantized_name(name), quantized_version(version), model_hash)
    latents = create(config, replace(artifact, format=name, version=version), model_hash, device)
    made = quantized_name(name), quantized_version(version)
    return QuantizedPages(*made, latents, artifact, config, device)


def _read_code(
    artifact: Artifact,
    plane: Plane,
    index: int,
    outliers: int,
    config: ModelConfig,
    device: torch.device | str,
) -> VectorCode:
    """Return the code of the plane "k" or "v" of one layer, for the KV heads of ``config``.

    Raises:
        CalibrationError: a tensor is missing or does not fit the plane.
    """
    width, name = plane.shape[-1], plane.name
    check_width(artifact.format, width)
    parameters = artifact.tensor(f"{name}_code.{index}", (3, config.all_kv_heads, width))
    levels = artifact.tensor(f"{name}_levels.{index}", (None,))
    if len(levels) not in {2**bits for bits in BITS} or bool((levels.diff() < 0).any()):
        raise CalibrationError(
            f"calibration of {artifact.format}: '{name}_levels.{index}' is not 8 or 16 numbers in "
            "ascending order"
        )
    if not bool((parameters[1] > 0).all()):
        raise CalibrationError(
            f"calibration of {artifact.format}: '{name}_code.{index}' has a scale that is not "
            "positive"
        )
    own = slice(config.kv_heads.start, config.kv_heads.stop)
    mean, scale, weight = parameters[:, own].to(device)
    return VectorCode(mean, scale, weight, levels.to(device), outliers, by_token=name == "v")
