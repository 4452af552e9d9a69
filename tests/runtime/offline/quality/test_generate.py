"""Greedy generation with exact and stored pages, with tiny random models."""

import math
from dataclasses import replace

import pytest
import torch

from runtime.attention.base import Batch, SequenceSlice
from runtime.errors import KVFormatError, NotFinite, QualityError
from runtime.kv.compressed import CompressedFormat
from runtime.models.build import build_model
from runtime.models.model import Model
from runtime.offline.quality.checkpoints import peer_output
from runtime.offline.quality.generate import Float32KV, Generator, outputs_of
from runtime.pages.plan import PageCount
from tests.runtime.offline.quality.formats import Identity, Int8, Scaled, TwoBit
from tests.runtime.offline.quality.stepwise import PAGE, Stepwise
from tests.runtime.offline.quality.test_attention import Unwritten
from tests.runtime.tiny import CONFIG, prompt_of, tiny_checkpoint, tiny_model

LENGTHS = (1, 16, 79, 95, 96, 150)
"""Lengths around the first stored page of a prompt (96) and of a decode step."""
PROMPTS = [list(prompt_of(length, seed)) for seed, length in enumerate(LENGTHS)]


def one_by_one(
    model: Model, prompt: list[int], count: int, compressed: CompressedFormat
) -> list[int]:
    """Prefill a prompt exactly, then decode one token at a time with a naive loop."""
    pages = list(range((len(prompt) + count) // PAGE + 1))
    cache = model.new_cache(PageCount(len(pages)))
    logits = model.forward(Batch.of([SequenceSlice(prompt, 0, pages)]), cache)
    stepwise = Stepwise(compressed, model.kv_format.planes(0, PAGE), window=True)
    tokens = [int(logits.argmax())]
    own, model.kv_format = model.kv_format, stepwise
    while len(tokens) < count:
        at = len(prompt) + len(tokens) - 1
        batch = Batch.of([SequenceSlice(tokens[-1:], at, pages)])
        tokens.append(int(model.forward(batch, cache).argmax()))
    model.kv_format = own
    return tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Scaled, TwoBit])
def test_outputs_equal_those_of_a_naive_loop(kind: type[Identity]) -> None:
    model = tiny_model(head_norms=True)
    found = Generator(model, PROMPTS, 40).compressed(kind(CONFIG))
    assert found == [one_by_one(model, prompt, 40, kind(CONFIG)) for prompt in PROMPTS]


def test_lossless_format_equals_exact_kv() -> None:
    generator = Generator(tiny_model(), PROMPTS, 40)
    exact = generator.exact()
    assert generator.compressed(Identity(CONFIG)) == exact
    assert [len(output) for output in exact] == [40] * len(PROMPTS)
    # Formats do not change the shared KV of the prompts.
    assert generator.compressed(TwoBit(CONFIG)) != exact
    assert generator.exact() == exact


def test_all_formats_share_the_first_token() -> None:
    generator = Generator(tiny_model(), PROMPTS, 20)
    exact, two_bit = generator.exact(), generator.compressed(TwoBit(CONFIG))
    assert [output[0] for output in two_bit] == [output[0] for output in exact]
    assert exact[:3] == two_bit[:3]  # at most 99 tokens: one page is stored in the last steps only
    assert exact[5] != two_bit[5]


def test_a_prompt_has_the_same_output_in_any_batch() -> None:
    model = tiny_model()
    together = Generator(model, PROMPTS, 30).compressed(Int8(CONFIG))
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert Generator(model, [prompt], 30).compressed(Int8(CONFIG)) == [expected]


def test_outputs_end_after_an_end_token() -> None:
    full = Generator(tiny_model(), PROMPTS, 30).exact()
    end = full[1][7]
    model = build_model(tiny_checkpoint(config=replace(CONFIG, eos_token_ids=(end,))))
    for output, expected in zip(Generator(model, PROMPTS, 30).exact(), full, strict=True):
        count = expected.index(end) + 1 if end in expected else 30
        assert output == expected[:count]


@pytest.mark.parametrize("length", [0, CONFIG.context_length - 9])
def test_prompts_must_leave_room_for_their_outputs(length: int) -> None:
    with pytest.raises(QualityError, match=f"1 to {CONFIG.context_length - 10} tokens"):
        Generator(tiny_model(), [list(prompt_of(length))], 10)


def test_malformed_pages_and_logits_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(KVFormatError, match="test-unwritten, layer 0: decode"):
        Generator(model, PROMPTS, 4).compressed(Unwritten(CONFIG))
    own = model.kv_format
    broken = tiny_checkpoint()
    with pytest.raises(NotFinite):
        Generator(build_model(replace(broken, final_norm=broken.final_norm * math.nan)), PROMPTS, 4)
    assert model.kv_format is own


def test_float32_kv_is_closer_to_transformers_than_bf16_kv() -> None:
    from runtime.offline.bench import peers

    checkpoint = tiny_checkpoint()
    peer = peers.build(checkpoint)
    model = build_model(checkpoint)
    found = outputs_of(model, PROMPTS, 30, Float32KV(CONFIG))
    assert found == [peer_output(peer, prompt, 30, ()) for prompt in PROMPTS]
    assert Float32KV(CONFIG).planes(0, 16)[1].dtype == torch.float32


def test_peer_output_ends_after_an_end_token() -> None:
    from runtime.offline.bench import peers

    peer = peers.build(tiny_checkpoint())
    full = peer_output(peer, PROMPTS[1], 12, ())
    assert peer_output(peer, PROMPTS[1], 12, (full[3],)) == full[: full.index(full[3]) + 1]
