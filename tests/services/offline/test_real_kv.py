"""KV of prompts of real text."""

import copy
import weakref
from dataclasses import replace

import pytest
from rich.console import Console

from runtime.checkpoint.weights import LayersOnDemand
from runtime.models.build import build_model
from runtime.pages.plan import PAGE_SIZE
from services.offline.real_kv import SAMPLE_PROMPTS, SAMPLE_TOKENS, prefill_sample
from tests.runtime.tiny import CONFIG, tiny_checkpoint


@pytest.mark.parametrize(
    ("context", "pages"),
    [(400, 399 // PAGE_SIZE), (SAMPLE_TOKENS, 31), (4096, SAMPLE_TOKENS // PAGE_SIZE)],
)
def test_prompts_fit_the_context(context: int, pages: int) -> None:
    checkpoint = tiny_checkpoint(config=replace(CONFIG, context_length=context))
    model = build_model(checkpoint, page_size=PAGE_SIZE)
    tokens = [token % CONFIG.vocab_size for token in range(SAMPLE_PROMPTS * SAMPLE_TOKENS)]
    sample = prefill_sample(model, tokens, Console(quiet=True))
    assert {key: kv.shape[0] for key, kv in sample.items()} == {
        (layer, name): SAMPLE_PROMPTS * pages
        for layer in range(CONFIG.num_layers)
        for name in ("k", "v")
    }


def test_streamed_model_holds_one_layer_and_has_the_same_kv() -> None:
    checkpoint = tiny_checkpoint(config=replace(CONFIG, num_layers=4))
    tokens = [token % CONFIG.vocab_size for token in range(SAMPLE_PROMPTS * SAMPLE_TOKENS)]
    living: list[weakref.ref[object]] = []
    most = 0

    def read(index: int) -> object:
        nonlocal most
        layer = copy.copy(checkpoint.layers[index])
        living.append(weakref.ref(layer))
        most = max(most, sum(each() is not None for each in living))
        return layer

    on_demand = replace(checkpoint, layers=LayersOnDemand(read, checkpoint.layers))
    streamed = build_model(on_demand, page_size=PAGE_SIZE, streamed=True)
    sample = prefill_sample(streamed, tokens, Console(quiet=True))
    assert len(living) == 4, "more than one pass"
    assert most == 1
    whole = build_model(checkpoint, page_size=PAGE_SIZE)
    expected = prefill_sample(whole, tokens, Console(quiet=True))
    assert sample.keys() == expected.keys()
    assert all(sample[key].equal(kv) for key, kv in expected.items())
    assert streamed.weight_bytes == whole.weight_bytes
