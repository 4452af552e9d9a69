"""The default of ``overflow_tokens`` on a GPU: tokens whose KV has 2/3 of the bytes of the weights.

A step reads the KV in the form in which decoding keeps it, so this form counts.
"""

from typing import Any

import pytest

from services.decode.service import _overflow_tokens
from services.decode.settings import DecodeSettings
from tests.runtime.tiny import CONFIG
from tests.services.workers import load, with_rank

DENSE = CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2 * 2  # bytes of a token
INT4 = CONFIG.num_layers * CONFIG.num_kv_heads * 2 * (CONFIG.head_dim // 2 + 4)  # with scales


def overflow(setting: int | str = "auto", device: str = "cuda", **loaded: Any) -> int | None:
    settings = DecodeSettings.model_validate({"overflow_tokens": setting})
    given = load(**loaded)
    given.rank.executor.model.step_weight_bytes = 3 << 20
    made = with_rank(given, device=device)
    return _overflow_tokens(settings, made)


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


def test_setting_and_cpu_do_not_depend_on_the_format() -> None:
    assert overflow(7, kv_format="int4") == 7
    assert overflow("never") is None
    assert overflow(device="cpu") is None
