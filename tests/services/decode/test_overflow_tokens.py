"""The default of ``overflow_tokens`` on a GPU: tokens whose KV has 2/3 of the bytes of the weights.

A step reads the KV in the form in which decoding keeps it, so this form counts.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.decode.service import _overflow_tokens
from services.decode.settings import DecodeSettings
from tests.runtime.tiny import CONFIG
from tests.services.workers import load, with_rank

DENSE = CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2 * 2  # bytes of a token
INT4 = CONFIG.num_layers * CONFIG.num_kv_heads * 2 * (CONFIG.head_dim // 2 + 4)  # with scales


def overflow(
    setting: int | str = "auto", device: str = "cuda", others: int = 1, **loaded: Any
) -> int | None:
    """Return the tokens for a worker whose other rank has ``others`` times the KV heads."""
    settings = DecodeSettings.model_validate({"overflow_tokens": setting})
    given = load(**loaded)
    given.rank.executor.model.step_weight_bytes = 3 << 20
    made = with_rank(given, device=device)
    layout: Any = given.rank.executor.cache.layout
    page_bytes = layout.page_bytes
    more = replace(page_bytes, groups=tuple(others * size for size in page_bytes.groups))
    endpoints: Any = (
        SimpleNamespace(layout=layout),
        SimpleNamespace(layout=SimpleNamespace(page_bytes=more)),
    )
    return _overflow_tokens(settings, made, endpoints)


@pytest.mark.parametrize(
    ("loaded", "kv_bytes"),
    [
        ({}, DENSE),
        ({"kv_format": "int4"}, INT4),
        ({"kv_eviction": 0.5}, DENSE / 2),
        ({"kv_format": "int4", "kv_eviction": 0.75}, INT4 / 4),
    ],
)
def test_default_counts_kv_as_decoding_keeps_it(loaded: dict[str, Any], kv_bytes: float) -> None:
    assert overflow(**loaded) == (2 << 20) // kv_bytes


def test_default_counts_the_kv_of_the_rank_with_the_most() -> None:
    assert overflow(others=2) == (2 << 20) // (2 * DENSE)


def test_setting_and_cpu_do_not_depend_on_the_format() -> None:
    assert overflow(7, kv_format="int4") == 7
    assert overflow("never") is None
    assert overflow(device="cpu") is None
