"""Greedy generation in one batch, with the KV of prompts shared by all formats."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.reference import ReferenceAttention
from runtime.config import ModelConfig
from runtime.errors import NotFinite, QualityError
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.compressed import CompressedFormat
from runtime.kv.dense import DenseFormat
from runtime.kv.format import KVFormat, Plane
from runtime.kv.windowed import WindowedFormat
from runtime.models.model import Model
from runtime.offline.quality.attention import RoundTrip
from runtime.pages.plan import pages_for
from runtime.pages.window import SINK_PAGES, first_recent


class Float32KV(DenseFormat):
    """K and V in fp32, attended by the reference kernel: no value is rounded to bf16."""

    name = "fp32"
    dense_bf16 = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, ReferenceAttention)

    def planes(self, layer: int, page_size: int) -> tuple[Plane, ...]:
        return tuple(
            replace(plane, dtype=torch.float32) for plane in super().planes(layer, page_size)
        )


class Generator:
    """Greedy outputs of one model for some prompts, with several KV formats.

    Prompts are computed once, with exact KV, as a worker does. Only decode steps differ between
    formats; the first token is therefore the same for all of them.

    Args:
        model: model with KV format `dense`.
        max_tokens: maximum tokens of an output. It ends earlier after an end-of-sequence token.
        exact: format of the prompts' KV; by default, `dense` with the model's kernels.

    Raises:
        QualityError: a prompt is empty, or leaves no room for its output.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        exact: KVFormat | None = None,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._exact = exact or model.kv_format
        room = model.context_length - max_tokens
        if not all(1 <= len(prompt) <= room for prompt in prompts):
            raise QualityError(f"prompts must have 1 to {room} tokens")
        self._pages: list[list[int]] = []
        used = 0
        for prompt in prompts:
            count = pages_for(len(prompt) + max_tokens, model.page_size)
            self._pages.append(list(range(used, used + count)))
            used += count
        self._num_pages = used
        self._prompt_kv = self._cache(self._exact)
        self._first = [self._prefill(*pair) for pair in zip(prompts, self._pages, strict=True)]

    def exact(self) -> list[list[int]]:
        """Return the outputs with exact bf16 KV, summed in the same order as in `compressed`."""
        return self._decode(DenseFormat(self._model.config, ReferenceAttention))

    def served(self) -> list[list[int]]:
        """Return the outputs with the KV format in which prompts are computed, ``exact``."""
        return self._decode(self._exact)

    def compressed(self, compressed: CompressedFormat) -> list[list[int]]:
        """Return the outputs of decode steps that attend to compressed pages.

        The pages of a prompt that are not recent are encoded before the first step. The sinks and
        the window stay exact.
        """
        config = self._model.config
        exact = DenseFormat(config, ReferenceAttention)
        return self._decode(WindowedFormat(exact, RoundTrip(compressed, config)))

    def _prefill(self, prompt: Sequence[int], pages: list[int]) -> int:
        batch = Batch.of([SequenceSlice(prompt, 0, pages)], self._model.device)
        return self._step(batch, self._prompt_kv, self._exact)[0]

    @torch.inference_mode()
    def _decode(self, kv_format: KVFormat) -> list[list[int]]:
        """Continue all prompts; each step computes one token of every unfinished output."""
        cache = self._cache(kv_format)
        self._copy_prompts(cache)
        if isinstance(kv_format, WindowedFormat):
            self._encode_prompts(kv_format, cache)
        outputs = [[token] for token in self._first]
        ends = self._model.config.eos_token_ids
        while running := [
            number
            for number, output in enumerate(outputs)
            if len(output) < self._max_tokens and output[-1] not in ends
        ]:
            slices = []
            for number in running:
                # Compressed pages have the same ids as the full-precision pages that they replace.
                pages, output = self._pages[number], outputs[number]
                at = len(self._prompts[number]) + len(output) - 1
                more = [pages] * (len(cache.pages) - 1)
                slices.append(SequenceSlice([output[-1]], at, pages, more_pages=more))
            tokens = self._step(Batch.of(slices, self._model.device), cache, kv_format)
            for number, token in zip(running, tokens, strict=True):
                outputs[number].append(token)
        return outputs

    @torch.inference_mode()
    def _step(self, batch: Batch, cache: PagedCache, kv_format: KVFormat) -> list[int]:
        model = self._model
        own, model.kv_format = model.kv_format, kv_format
        try:
            logits = model.forward(batch, cache)
        finally:
            model.kv_format = own
        if not logits.isfinite().all():
            raise NotFinite(f"logits are not finite with KV format {kv_format.name}")
        best: list[int] = logits.argmax(-1).tolist()
        return best

    def _cache(self, kv_format: KVFormat) -> PagedCache:
        layout = CacheLayout.of(
            kv_format,
            num_layers=self._model.config.num_layers,
            page_size=self._model.page_size,
        )
        return PagedCache(layout, layout.plan.each(self._num_pages), self._model.device)

    def _copy_prompts(self, cache: PagedCache) -> None:
        for layer in range(self._model.config.num_layers):
            sources = self._prompt_kv.layer(layer)
            # K and V come first. A `WindowedFormat` has compressed planes after them.
            for target, source in zip(cache.layer(layer), sources, strict=False):
                target.copy_(source)

    def _encode_prompts(self, kv_format: WindowedFormat, cache: PagedCache) -> None:
        size = self._model.page_size
        pages: list[int] = []
        first: list[int] = []
        for prompt, own in zip(self._prompts, self._pages, strict=True):
            old = range(SINK_PAGES, first_recent(len(prompt), size))
            pages += own[old.start : old.stop]
            first += [page * size for page in old]
        if pages:
            layers = [cache.layer(layer) for layer in range(self._model.config.num_layers)]
            ids, positions = torch.tensor([pages, first], device=self._model.device)
            kv_format.encoder(layers).encode(ids, ids, positions)


def outputs_of(
    model: Model, prompts: Sequence[Sequence[int]], max_tokens: int, exact: KVFormat | None = None
) -> list[list[int]]:
    """Return the greedy outputs of a model without a compressed format, one for each prompt.

    Args:
        model: model with KV format `dense`.
        prompts: token ids of each prompt.
        max_tokens: maximum tokens of an output.
        exact: KV format of prompts and outputs; by default, `dense` with the model's kernels.
    """
    return Generator(model, prompts, max_tokens, exact=exact).served()
