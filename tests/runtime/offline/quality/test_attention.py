"""Teacher-forced attention over exact and stored pages, with tiny random models."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.errors import KVFormatError
from runtime.kv.compressed import CompressedFormat
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.quality.attention import TeacherForced, blocks, stored_pages
from runtime.offline.quality.measure import logits_of
from tests.runtime.offline.quality.formats import Identity, Int8, Scaled, TwoBit
from tests.runtime.offline.quality.stepwise import stepwise_logits
from tests.runtime.tiny import CONFIG, prompt_of, tiny_checkpoint, tiny_model

LENGTHS = (1, 17, 95, 96, 111, 112, 257)


def logits(
    model: Model, length: int, compressed: CompressedFormat | None, *, window: bool = True
) -> Tensor:
    text = torch.tensor(prompt_of(length))
    return logits_of(model, text, TeacherForced(model.config, compressed, window=window))


@pytest.mark.parametrize(
    ("length", "window", "stored"),
    [
        (1, True, []),
        (95, True, []),
        (96, True, [1]),  # page 1 is encoded in the step with L = 16 + 80
        (111, True, [1]),
        (112, True, [1, 2]),
        (15, False, []),
        (16, False, [0]),
        (47, False, [0, 1]),
    ],
)
def test_stored_pages_of_a_length(length: int, window: bool, stored: list[int]) -> None:
    assert list(stored_pages(length, 16, window=window)) == stored


@pytest.mark.parametrize("window", [True, False])
def test_blocks_cover_all_rows_with_the_stored_pages_of_each(window: bool) -> None:
    positions = [*range(40), *range(60, 200), 230, 380]
    rows = []
    for block, stored in blocks(positions, 16, window=window):
        for row in range(len(positions))[block]:
            rows.append(row)
            expected = stored_pages(positions[row] + 1, 16, window=window)
            assert stored == expected
    assert rows == list(range(len(positions)))


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_identity_equals_exact_bitwise(length: int, window: bool) -> None:
    model = tiny_model(head_norms=True)
    exact = logits(model, length, None, window=window)
    assert torch.equal(logits(model, length, Identity(CONFIG), window=window), exact)


@pytest.mark.parametrize("length", LENGTHS)
def test_exact_equals_the_serving_kernel_up_to_summation_order(length: int) -> None:
    model = tiny_model()
    served = logits_of(model, torch.tensor(prompt_of(length)), model.kv_format)
    # One rounding of K or V to bf16 may differ.
    torch.testing.assert_close(logits(model, length, None), served, atol=0.02, rtol=0)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("window", [True, False])
def test_equals_decoding_step_by_step(window: bool) -> None:
    model = tiny_model(bias=True)
    compressed = Scaled(CONFIG)
    found = logits(model, 213, compressed, window=window)
    expected = stepwise_logits(model, list(prompt_of(213)), compressed, window=window)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_first_differences_are_where_pages_become_stored() -> None:
    model = tiny_model()
    exact = logits(model, 130, None)
    changed = (logits(model, 130, Scaled(CONFIG)) - exact).abs().amax(1) > 0
    assert changed.tolist() == [False] * 95 + [True] * 35
    exact = logits(model, 130, None, window=False)
    changed = (logits(model, 130, Scaled(CONFIG), window=False) - exact).abs().amax(1) > 0
    assert changed.tolist() == [False] * 15 + [True] * 115


def test_errors_of_fewer_bits_are_larger() -> None:
    model = tiny_model()
    exact = logits(model, 257, None)
    formats = Identity(CONFIG), Int8(CONFIG), TwoBit(CONFIG)
    none, int8, two_bit = (float((logits(model, 257, one) - exact).norm()) for one in formats)
    assert none == 0
    assert 0 < int8 < two_bit / 10


def test_many_kv_heads_and_another_page_size() -> None:
    config = replace(CONFIG, num_kv_heads=6)
    model = build_model(tiny_checkpoint(config=config), page_size=8)
    exact = logits(model, 150, None)
    assert torch.equal(logits(model, 150, Identity(config)), exact)
    changed = (logits(model, 150, Scaled(config)) - exact).abs().amax(1) > 0
    assert changed.tolist() == [False] * 79 + [True] * 71  # page 1 is stored from L = 8 + 72 on


class Unwritten(Identity):
    """Encodes nothing, so that planes are read as they were allocated."""

    name = "test-unwritten"

    def encode(self, *args: object) -> None: ...


class WrongShape(Identity):
    """Returns tokens before heads."""

    name = "test-wrong-shape"

    def decode(
        self, planes: tuple[Tensor, ...], pages: Tensor, first_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().decode(planes, pages, first_positions)
        return keys.transpose(1, 2), values.transpose(1, 2)


@pytest.mark.parametrize("kind", [Unwritten, WrongShape])
def test_malformed_decoded_pages_are_refused(kind: type[Identity]) -> None:
    with pytest.raises(KVFormatError, match=f"format {kind.name}, layer 0: decode"):
        logits(tiny_model(), 100, kind(CONFIG))


def test_model_keeps_its_own_format() -> None:
    model = tiny_model()
    own = model.kv_format
    with pytest.raises(KVFormatError):
        logits(model, 100, Unwritten(CONFIG))
    assert model.kv_format is own
