"""Formats with compressed pages: which pages are encoded when, and what is attended."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from runtime.attention.base import Batch, SequenceSlice
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.compressed import COMPRESSED, FULL_PRECISION, CompressedFormat
from runtime.kv.dense import DenseFormat
from runtime.kv.registry import COMPRESSED as COMPRESSED_FORMATS
from runtime.kv.windowed import WindowedFormat
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.pages.plan import PageCount
from runtime.pages.window import SINK_PAGES, first_recent
from tests.runtime.offline.quality.formats import Identity, Scaled
from tests.runtime.tiny import CONFIG, tiny_checkpoint

PAGE = 16
PAGES = 16
PROMPT, END = 100, 200  # tokens


class Recorded(Identity):
    """Lossless; records the first positions of the pages of each call of `encode`."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.encoded: list[list[int]] = []

    def encode(
        self,
        keys: Tensor,
        values: Tensor,
        first_positions: Tensor,
        planes: tuple[Tensor, ...],
        targets: Tensor,
    ) -> None:
        self.encoded.append(first_positions.tolist())
        super().encode(keys, values, first_positions, planes, targets)


def windowed_model(compressed: CompressedFormat) -> Model:
    model = build_model(tiny_checkpoint())
    exact = model.kv_format
    assert isinstance(exact, DenseFormat)
    model.kv_format = WindowedFormat(exact, compressed)
    model.layout = CacheLayout.of(model.kv_format, num_layers=CONFIG.num_layers, page_size=PAGE)
    return model


def logits(model: Model, tokens: list[int], *, poison: bool = False) -> Iterator[Tensor]:
    """Yield the logits of a prompt and of each decode step.

    Args:
        poison: overwrite full-precision pages once they are encoded.
    """
    cache = PagedCache(model.layout, model.layout.plan.each(PAGES))
    pages = list(range(PAGES))
    stored = list(reversed(pages))[: PAGES - SINK_PAGES]
    yield model.forward(Batch.of([SequenceSlice(tokens[:PROMPT], 0, pages)]), cache)
    if isinstance(model.kv_format, WindowedFormat):
        ended = torch.arange(SINK_PAGES, first_recent(PROMPT, PAGE))
        layers = [cache.layer(index) for index in range(CONFIG.num_layers)]
        targets = torch.tensor(stored)[ended - SINK_PAGES]
        model.kv_format.encoder(layers).encode(ended, targets, ended * PAGE)
    for position in range(PROMPT, END):
        if poison:
            for plane, tensor in zip(model.layout.planes, cache.planes, strict=True):
                if plane[1].group != COMPRESSED:
                    tensor[SINK_PAGES : first_recent(position, PAGE)] = torch.nan
        more = [[-1] * SINK_PAGES + stored] * (len(cache.pages) - 1)
        piece = SequenceSlice(tokens[position : position + 1], position, pages, more_pages=more)
        yield model.forward(Batch.of([piece]), cache)


@pytest.fixture
def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, CONFIG.vocab_size, (END,), generator=generator).tolist()


def test_lossless_stored_pages_change_nothing(tokens: list[int]) -> None:
    expected = list(logits(build_model(tiny_checkpoint()), tokens))
    found = list(logits(windowed_model(Identity(CONFIG)), tokens))
    for row, other in zip(found, expected, strict=True):
        torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-4)


def test_encoded_exact_pages_are_not_read_again(tokens: list[int]) -> None:
    expected = list(logits(windowed_model(Scaled(CONFIG)), tokens))
    found = list(logits(windowed_model(Scaled(CONFIG)), tokens, poison=True))
    for row, other in zip(found, expected, strict=True):
        assert torch.equal(row, other)


def test_stored_pages_are_attended(tokens: list[int]) -> None:
    exact, changed = (
        list(logits(windowed_model(compressed(CONFIG)), tokens))
        for compressed in (Identity, Scaled)
    )
    assert torch.equal(exact[0], changed[0]), "a prompt attends full-precision pages"
    assert not torch.allclose(exact[1], changed[1], atol=1e-3)


def test_each_page_is_encoded_once_when_it_leaves_the_window(tokens: list[int]) -> None:
    compressed = Recorded()
    list(logits(windowed_model(compressed), tokens))
    last = first_recent(END, PAGE)
    expected = [[PAGE * page] for page in range(SINK_PAGES, last)]
    assert compressed.encoded == [each for each in expected for _ in range(CONFIG.num_layers)]


@pytest.mark.parametrize(("length", "page"), [(95, None), (96, 1), (97, None), (160, 5)])
def test_leaving_page_can_be_encoded_before_a_step(length: int, page: int | None) -> None:
    compressed = Recorded()
    model = windowed_model(compressed)
    assert isinstance(model.kv_format, WindowedFormat)
    cache = PagedCache(model.layout, PageCount(PAGES, PAGES))
    layers = [cache.layer(index) for index in range(CONFIG.num_layers)]
    pages = list(range(PAGES))
    step = SequenceSlice([1], length - 1, pages, more_pages=[pages])
    model.kv_format.encoder(layers).encode_leaving(Batch.of([step]))
    expected = [] if page is None else [[PAGE * page]] * CONFIG.num_layers
    assert compressed.encoded == expected


@pytest.mark.parametrize("name", COMPRESSED_FORMATS)
def test_built_in_formats_have_a_cache_layout(name: str) -> None:
    compressed = COMPRESSED_FORMATS[name](CONFIG)
    planes = windowed_model(compressed).layout.layers[0]
    assert {plane.group for plane in planes[:2]} == {FULL_PRECISION}
    assert {plane.group for plane in planes[2:]} == {COMPRESSED}
    stored = compressed.planes(0, PAGE)
    assert [plane.name for plane in planes[2:]] == [f"{plane.name}_stored" for plane in stored]


@pytest.mark.parametrize(
    ("length", "page"), [(1, 1), (80, 1), (95, 1), (96, 2), (111, 2), (112, 3), (8192, 508)]
)
def test_at_least_the_window_and_the_first_page_stay_exact(length: int, page: int) -> None:
    assert first_recent(length, PAGE) == page
    assert page == SINK_PAGES or length - page * PAGE >= 64
