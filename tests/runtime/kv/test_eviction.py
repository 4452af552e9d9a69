"""Keyformer eviction: scores and compaction against plain loops, and formats that refuse it."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from runtime.errors import KVFormatError
from runtime.kv import eviction, fdc, palu, shard
from runtime.kv.compressed import CompressedFormat
from runtime.kv.dense import DenseFormat
from runtime.kv.eviction import check_eviction, compact, gumbel_noise, kept_tokens, key_scores
from runtime.kv.fdc import FdcFormat
from runtime.kv.palu import PaluFormat
from runtime.kv.registry import COMPRESSED, PlainFormat, create_format
from runtime.kv.shard import ShardFormat
from runtime.kv.windowed import WindowedFormat
from runtime.pages.eviction import MIN_PROMPT, QUERIES, evicted_tokens, vacated_pages
from runtime.pages.window import first_recent
from tests.runtime.kv import quantized
from tests.runtime.kv.lowrank import CONFIG as SHAPE
from tests.runtime.kv.lowrank import activations, moments_of, orthonormal
from tests.runtime.tiny import CONFIG

PAGE = 16


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 160, 255, 1000, 1536])
def test_evicted_tokens_are_whole_pages_between_sinks_and_window(tokens: int, share: float) -> None:
    evicted = evicted_tokens(tokens, share, PAGE)
    assert evicted % PAGE == 0
    if tokens < MIN_PROMPT:
        assert evicted == 0
        return
    between = PAGE * (first_recent(tokens, PAGE) - 1)
    wanted = int(share * tokens)
    assert evicted == between or wanted - PAGE < evicted <= wanted
    assert evicted <= between
    kept = tokens - evicted
    assert first_recent(kept, PAGE) == first_recent(tokens, PAGE) - evicted // PAGE
    vacated = vacated_pages(tokens, evicted, PAGE)
    assert (len(vacated), vacated.stop) == (evicted // PAGE, first_recent(tokens, PAGE))


def test_no_share_evicts_nothing() -> None:
    assert evicted_tokens(4096, 0.0, PAGE) == 0
    assert QUERIES <= MIN_PROMPT


def scores_by_loops(queries: torch.Tensor, keys: torch.Tensor, noise: torch.Tensor) -> np.ndarray:
    count, heads, dim = queries.shape
    kv_heads, tokens, _ = keys.shape
    group = heads // kv_heads
    scores = np.zeros((kv_heads, tokens))
    for head in range(heads):
        kv = head // group
        for row in range(count):
            visible = tokens - count + row + 1
            logits = [
                float(queries[row, head] @ keys[kv, t]) / math.sqrt(dim) + float(noise[kv, t])
                for t in range(visible)
            ]
            weights = np.exp(np.array(logits) - max(logits))
            scores[kv, :visible] += weights / weights.sum()
    return scores


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize(("count", "tokens"), [(1, 20), (7, 50), (32, 33)])
def test_scores_equal_plain_loops(
    heads: int, kv_heads: int, count: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = random(count, heads, 8), random(kv_heads, tokens, 8, seed=1)
    noise = torch.from_numpy(gumbel_noise(tokens, kv_heads))
    found = key_scores(queries, keys, noise)
    expected = scores_by_loops(queries, keys, noise)
    # fp32 against fp64
    assert torch.allclose(found.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-7)
    monkeypatch.setattr(eviction, "MAX_ELEMENTS", 1)  # one KV head at a time
    assert torch.equal(key_scores(queries, keys, noise), found)


def test_noise_is_gumbel_and_depends_on_position_and_head_alone() -> None:
    noise = gumbel_noise(20_000, 8)
    assert noise.dtype == np.float32
    assert np.array_equal(noise[:3, :100], gumbel_noise(100, 3))
    assert np.array_equal(noise[5:, :100], gumbel_noise(100, 3, first_head=5)), "of another rank"
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.01
    assert np.abs(np.corrcoef(noise) - np.eye(8)).max() < 0.03
    assert abs(np.corrcoef(noise[0, 1:], noise[0, :-1])[0, 1]) < 0.03
    assert noise[0, 0].item() == pytest.approx(-math.log(-math.log(hash_by_hand(0, 0))))
    assert noise[5, 777].item() == pytest.approx(-math.log(-math.log(hash_by_hand(777, 5))))


def hash_by_hand(position: int, head: int) -> float:
    x = (position * 0x9E3779B1 ^ (head + 1) * 0x85EBCA77) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return ((x ^ x >> 16) + 0.5) / 2**32


def test_kept_tokens_are_the_best_of_each_head_in_order() -> None:
    scores = torch.tensor([[3.0, 9.0, 1.0, 9.0, 4.0], [5.0, 5.0, 5.0, 5.0, 6.0]])
    assert kept_tokens(scores, 3).tolist() == [[1, 3, 4], [0, 1, 4]]


def test_compaction_moves_tokens_of_each_head() -> None:
    layers = [tuple(random(9, 2, PAGE, 4, seed=2 * n + i) for i in range(2)) for n in range(2)]
    before = [[plane.clone() for plane in planes] for planes in layers]
    pages = torch.tensor([7, 2, 5, 0, 3])
    kept = torch.stack([torch.arange(first, 48 + first)[::3] for first in (16, 18, 30, 31)])
    kept = kept.view(2, 2, 16)  # [layers, kv_heads, count]
    compact(layers, pages, kept, PAGE)
    untouched = [page for page in range(9) if page != 2]
    for layer, head, i in product(range(2), range(2), range(2)):
        plane, old = layers[layer][i], before[layer][i]
        for slot, token in enumerate(kept[layer, head].tolist()):
            source = pages[token // PAGE]
            assert torch.equal(plane[2, head, slot], old[source, head, token % PAGE])
        assert torch.equal(plane[untouched], old[untouched])


@pytest.mark.parametrize("name", ["dense", *COMPRESSED])
def test_formats_that_keep_rope_support_eviction(name: str) -> None:
    check_eviction(create_format(name, CONFIG, torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("name", ["fdc", "fdc without prc", "palu", "shard"])
def test_formats_that_undo_rope_are_refused(name: str) -> None:
    """After an eviction, the tokens of a page have positions that do not follow from its index."""
    text = [activations(orthonormal(h, 64, 64, seed=h), h) for h in (8, 4, 4)]
    moments = [moments_of(SHAPE, (text[0], text[1], text[2]))] * 2
    compressed: CompressedFormat
    if name == "palu":
        compressed = PaluFormat(SHAPE, palu.calibrate(moments, palu.PaluOptions(), ""))
    elif name == "shard":
        compressed = ShardFormat(SHAPE, shard.calibrate(moments, shard.ShardOptions(), ""))
    else:
        options = fdc.FdcOptions(prc=name == "fdc")
        compressed = FdcFormat(SHAPE, fdc.calibrate(moments, options, ""))
    exact = DenseFormat.create(SHAPE, torch.device("cpu"), torch.float32)
    windowed = WindowedFormat(exact, compressed)
    if name == "fdc":
        check_eviction(windowed)
        return
    message = f"KV format {compressed.name} does not support kv_eviction: it undoes RoPE"
    with pytest.raises(KVFormatError, match=message):
        check_eviction(windowed)


@pytest.mark.parametrize(
    ("name", "supported"),
    [("kvquant", True), ("kvquant-before", False), ("fdc", True), ("palu", False)],
)
def test_quantized_formats_support_eviction_if_they_keep_rope(name: str, supported: bool) -> None:
    """The latents of `fdc` and `palu` are quantized."""
    exact = DenseFormat.create(SHAPE, torch.device("cpu"), torch.float32)
    compressed = quantized.create(name, bits=4)
    for made in (compressed, WindowedFormat(exact, compressed)):
        if supported:
            check_eviction(made)
            continue
        with pytest.raises(KVFormatError, match="does not support kv_eviction: it undoes RoPE"):
            check_eviction(made)


class Foreign:
    name, version, artifact_hash, kernels = "foreign", 1, "", "none"
    graph_safe = dense_bf16 = False


def test_formats_that_do_not_state_keeps_rope_are_refused() -> None:
    with pytest.raises(KVFormatError, match=r"foreign does not support .* not state keeps_rope"):
        check_eviction(PlainFormat(Foreign()))  # type: ignore[arg-type]
