"""The decoder: tokens and paged KV in, logits out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from runtime.attention.base import Batch
from runtime.config import ModelConfig
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.format import KVFormat
from runtime.layers.residual import ResidualPart
from runtime.layers.rope import cos_sin_table
from runtime.layers.vocabulary import Vocabulary
from runtime.models.decoder import DecoderLayer
from runtime.pages.plan import PageCount
from runtime.parallel.group import ONE_RANK, RankGroup


@dataclass(eq=False, kw_only=True)
class Model:
    """A model prepared to run on one device; see `runtime.models.build.build_model`.

    Attributes:
        config: shape of the model.
        kv_format: format in which KV is stored and attended.
        device, dtype: device and dtype of the computation.
        page_size: token slots of a page.
        embed: embeddings `[n, hidden]` of token ids `[n]`.
        embed_positions: learned embeddings `[n, hidden]` of positions `[n]`, which are added to the
            token embeddings; None if the model has none.
        layers: layers in order.
        final_norm: norm before the LM head.
        lm_head: logits `[n, own]` of this rank's token ids, from the normalized residual stream.
        vocabulary: division of the token ids among the ranks.
        matmul: implementation of the matmuls; logged, and part of `kernel_plan_hash`.
        plan_hash: hash of the plan that chooses the kernel of each matmul; empty without one.
        weight_bytes: bytes of the weights in memory; a tensor that layers share counts once.
            Packed GPU weights (`runtime.gemm`) count with their padding, others as the checkpoint's
            tensors in the dtype of the computation.
        step_weight_bytes: bytes of the weights that a decode step reads; a tensor that layers share
            counts once for each of them.
        group: the ranks of the worker; with several, this is the part of one rank.
        residual: the rank's part of the residual stream, which the layers read and write; None if
            each rank has all of it. Embeddings and the final norm are those of all of it.
        layout: planes of the KV cache.
        rope: cosines and sines, fp32 `[context, dim / 2]` each.
    """

    config: ModelConfig
    kv_format: KVFormat
    device: torch.device
    dtype: torch.dtype
    page_size: int
    embed: Callable[[Tensor], Tensor]
    layers: Sequence[DecoderLayer]
    final_norm: Callable[[Tensor], Tensor]
    lm_head: Callable[[Tensor], Tensor]
    vocabulary: Vocabulary
    matmul: str
    weight_bytes: int
    step_weight_bytes: int
    plan_hash: str = ""
    group: RankGroup = ONE_RANK
    embed_positions: Callable[[Tensor], Tensor] | None = None
    residual: ResidualPart | None = None
    layout: CacheLayout = field(init=False)
    rope: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = CacheLayout.of(
            self.kv_format, num_layers=self.config.num_layers, page_size=self.page_size
        )
        cos, sin = cos_sin_table(self.config, self.config.context_length)
        self.rope = cos.to(self.device), sin.to(self.device)

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self.config.context_length

    @property
    def replayable(self) -> bool:
        """Whether steps can be replayed as CUDA graphs."""
        return self.device.type == "cuda" and self.kv_format.graph_safe

    @property
    def factorized_layers(self) -> int:
        """Number of layers with at least one factor pair."""
        return sum(layer.factorized for layer in self.layers)

    def new_cache(self, pages: PageCount) -> PagedCache:
        """Allocate pages for this model's KV; see `PagedCache`."""
        return PagedCache(self.layout, pages, self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Run the model on a batch: write its tokens' KV into the pages, and return logits.

        Returns:
            Logits of this rank's token ids, fp32 `[m, own]`, one row for each of the batch's
            ``logit_rows``. `Vocabulary.whole` gathers those of all ids.
        """
        *stages, last = self.stages(batch, cache)
        for stage in stages:
            stage()
        return last()

    def stages(self, batch: Batch, cache: PagedCache) -> list[Callable[[], Tensor]]:
        """Return the parts of `forward`: the embedding, every layer, and the logits.

        Each function must be called once, in order. The last one returns the logits. Each of them
        may be captured as a CUDA graph.
        """
        hidden = torch.empty(0)

        def embed() -> Tensor:
            nonlocal hidden
            hidden = self.embed(batch.tokens)
            if self.embed_positions is not None:
                hidden = hidden + self.embed_positions(batch.positions)
            if self.residual is not None:
                hidden = self.residual.own(hidden)
            return hidden

        def compute(index: int) -> Tensor:
            nonlocal hidden
            last = index == len(self.layers) - 1
            layer = self.layers[index]
            planes = cache.layer(index)
            kv = self.kv_format.layer(index)
            own = batch.of_group(self.layout.layer_groups[index])
            hidden = layer(hidden, self.rope, kv, planes, own, last=last)
            return hidden

        def normed(rows: Tensor) -> Tensor:
            return self.final_norm(rows if self.residual is None else self.residual.whole(rows))

        def logits() -> Tensor:
            rows = hidden
            if (log := batch.hidden) is not None:
                log.hidden.append(normed(hidden[log.rows]))
                rows = hidden[batch.logit_rows]
            if not len(rows):
                return rows.new_empty(0, len(self.vocabulary.own), dtype=torch.float32)
            return self.lm_head(normed(rows)).float()

        layers = [partial(compute, index) for index in range(len(self.layers))]
        return [embed, *layers, logits]
