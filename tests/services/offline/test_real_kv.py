"""KV of prompts of real text."""

from dataclasses import replace

import pytest
from rich.console import Console

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
