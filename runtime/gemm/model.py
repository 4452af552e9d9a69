"""Builds models over packed weights, whose matmuls and attention are kernels for Hopper GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.checkpoint.weights import Checkpoint
from runtime.config import ModelConfig
from runtime.gemm import weights as packed_weights
from runtime.gemm.plan import KernelPlan
from runtime.gemm.weights import PROJECTION_GROUPS, PackedWeights
from runtime.kv.format import KVFormat
from runtime.kv.registry import format_of
from runtime.layers.embedding import embedding_op
from runtime.layers.linear import linear_op
from runtime.layers.residual import ResidualPart
from runtime.layers.vocabulary import Vocabulary
from runtime.models.build import build_model
from runtime.models.decoder import DecoderLayer
from runtime.models.model import Model
from runtime.models.registry import model_family
from runtime.parallel.group import ONE_RANK, RankGroup
from runtime.parallel.partition import Scheme

if TYPE_CHECKING:  # optional: Triton
    from runtime.gemm.ops import GroupedGemm

HOPPER = (9, 0)
"""Compute capability for which the GEMM kernels and the megakernel are written."""


@dataclass(eq=False, kw_only=True)
class GemmModel(Model):
    """A model over packed weights.

    Attributes:
        weights: the weights that its layers read.
    """

    weights: PackedWeights

    def grouped_gemms(self) -> "Iterator[GroupedGemm]":
        """Yield the GEMMs for which a kernel plan chooses tiles."""
        from runtime.gemm.projections import PackedProjection

        for layer in self.layers:
            for part in vars(layer.parts).values():
                if isinstance(part, PackedProjection):
                    yield from part.gemms


def build_gemm_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    page_size: int = 16,
    plan: KernelPlan | None = None,
    kv_format: str = "dense",
    group: RankGroup = ONE_RANK,
) -> GemmModel:
    """Build a model with bf16 weights from a checkpoint; see also `runtime.models.build`.

    Args:
        plan: kernel of each GEMM. If None, `runtime.gemm.plan.default_tile` selects the kernels.
        group: see `build_model`.

    Raises:
        KVFormatError: the KV format is unknown or does not support the model.
        ValueError: the kernels do not support the model; see `unsupported_by_gemm`.
    """
    from runtime.gemm.layer import packed_norm

    config = checkpoint.config
    device, dtype = torch.device(device), torch.bfloat16
    chosen = format_of(kv_format, checkpoint, device, dtype, by_halves=True)
    if reason := _unsupported_family(config):
        raise ValueError(reason)
    plan = plan or KernelPlan()
    whole = _multiplied_out(checkpoint, plan, chosen)
    weights = PackedWeights.pack(whole, device, chosen.fold_weights)
    vocabulary = Vocabulary.of(config.vocab_size, checkpoint.partition, group)
    residual = ResidualPart.of(checkpoint.partition, config.hidden_size, group)
    return GemmModel(
        config=config,
        kv_format=chosen,
        device=device,
        dtype=dtype,
        page_size=page_size,
        embed=vocabulary.embedding(embedding_op(weights.embedding)),
        layers=_layers(weights, plan, group, residual, fused=chosen.dense_bf16),
        final_norm=packed_norm(weights, weights.final_norm),
        lm_head=linear_op(weights.lm_head.weight),
        vocabulary=vocabulary,
        matmul="gemm",
        weight_bytes=weights.nbytes + chosen.weight_bytes,
        step_weight_bytes=weights.step_weight_bytes + chosen.weight_bytes,
        plan_hash=plan.hash,
        group=group,
        residual=residual,
        weights=weights,
    )


def _layers(
    weights: PackedWeights,
    plan: KernelPlan,
    group: RankGroup,
    residual: ResidualPart | None,
    *,
    fused: bool,
) -> list[DecoderLayer]:
    """Return the decoder layers over packed weights.

    Args:
        fused: whether head norms and prefill attention may be fused; see `packed_parts`.
    """
    from runtime.attention.gpu import TritonAttention
    from runtime.gemm.layer import packed_parts

    config = weights.config
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    attention = TritonAttention(*heads, by_halves=True) if fused else None
    return [
        DecoderLayer(
            model_family(config),
            config,
            packed_parts(weights, layer, plan, attention, group, residual),
            factorized=bool(layer.inner),
        )
        for layer in weights.layers
    ]


def _multiplied_out(checkpoint: Checkpoint, plan: KernelPlan, kv_format: KVFormat) -> Checkpoint:
    """Return the checkpoint with the factor pairs multiplied out that the plan names.

    Q, K and V stay factor pairs if the KV format keeps the latents of K and V.
    Ranks of a worker hold parts of U and of V that cannot be multiplied. The whole checkpoint was
    multiplied out before a part of it was taken; see ``prepare`` of `load_checkpoint`.
    """
    if checkpoint.partition is not None:
        return checkpoint
    return plan.multiply_out(checkpoint, kept=PROJECTION_GROUPS[:1] * kv_format.keeps_latents)


def unsupported_by_gemm(
    checkpoint: Checkpoint, device: torch.device | str, dtype: torch.dtype
) -> str | None:
    """Return why `build_gemm_model` does not support a checkpoint on a device, or None.

    Only shapes are read.
    """
    if reason := _unsupported_family(checkpoint.config):
        return reason
    if checkpoint.partition is not None and checkpoint.partition.scheme is Scheme.BASE:
        return "packed layers do not add the whole outputs of linears over several ranks"
    device = torch.device(device)
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"weights are {dtype}, not bf16"
    if (found := torch.cuda.get_device_capability(device)) != HOPPER:
        return f"compute capability {found[0]}.{found[1]}, not {HOPPER[0]}.{HOPPER[1]}"
    return packed_weights.unsupported(checkpoint)


def build_fastest_model(
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    page_size: int = 16,
    plan: KernelPlan | None = None,
    kv_format: str = "dense",
    group: RankGroup = ONE_RANK,
) -> Model:
    """Prepare a checkpoint with the fastest kernels that support it, as workers do.

    Args:
        dtype: dtype of the computation.
        plan: used only if `unsupported_by_gemm` is None.
        group: see `build_model`.
    """
    if unsupported_by_gemm(checkpoint, device, dtype) is None:
        return build_gemm_model(
            checkpoint,
            device=device,
            page_size=page_size,
            plan=plan,
            kv_format=kv_format,
            group=group,
        )
    return build_model(
        checkpoint,
        device=device,
        dtype=dtype,
        page_size=page_size,
        kv_format=kv_format,
        group=group,
    )


def _unsupported_family(config: ModelConfig) -> str | None:
    """Return why `runtime.gemm` cannot run a model of this config, or None if it can.

    Reasons are the model family, sliding windows and learned position embeddings.
    """
    family = model_family(config)
    if any(config.windows):
        return "layers with a sliding window have no GPU kernels"
    if family.tensor_names.positions:
        return "learned embeddings of positions have no packed GPU weights"
    return None if family.packed_gemm else f"the {family.name} family has no packed GPU layers"
