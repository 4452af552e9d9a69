"""Bytes of KV that sequences occupy by format: ``python -m runtime.offline.bench kv-bytes --help``.

Pages are those that the allocator of an engine gives to one sequence: sinks, window, the unused
slots of the last page, and all stored pages. Bytes per page are those of a cache. The ratio is
the size of bf16 K and V of the same tokens, without unused slots, divided by the size of the pages.
Calibrations belong to a worker, not to a sequence, and are not counted.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from runtime.checkpoint.weights import layer_shapes
from runtime.config import ModelConfig
from runtime.core.request import Request, SamplingParams
from runtime.core.sequence import FREED, Purpose, SequenceGroup, SequenceState
from runtime.engine.pages import SequencePages
from runtime.kv import fdc, palu, shard
from runtime.kv.cache import CacheLayout
from runtime.kv.calibration import KVMoments
from runtime.kv.compressed import CompressedFormat
from runtime.kv.dense import DenseFormat
from runtime.kv.format import KVFormat
from runtime.kv.lowrank import LowRankFormat
from runtime.kv.registry import COMPRESSED
from runtime.kv.rotation import PageRotation
from runtime.kv.windowed import WindowedFormat
from runtime.offline.bench.shapes import PAGE, SHAPES, random_checkpoint
from runtime.pages.plan import PageCount, PagePlan, pages_for
from runtime.pages.sizes import token_bytes

SHARD_PUBLISHED = {4096: 8.84, 8192: 10.05, 16_384: 10.78, 32_768: 11.19}
"""Ratios by number of tokens in Shard's accounting: 352 B per token and layer, and 196,992 B per
sequence."""
SHARD_PUBLISHED_DECODED = 5.5
"""Shard's ratio with 8,192 prompt and 2,048 decoded tokens. It stores decoded tokens in 8 bits."""
KEEP = 0.6
"""Fraction of parameters that factor pairs keep in the model of `lowrank`."""
CONTEXTS = tuple(SHARD_PUBLISHED)
_CAPACITY = 1 << 16


def one_layer(shape: str = "llama-3-8b") -> ModelConfig:
    """Return the shape of a model with one layer. KV does not depend on its small vocabulary."""
    return replace(SHAPES[shape], num_layers=1, vocab_size=16)


@cache
def _moments(config: ModelConfig) -> KVMoments:
    """Return the moments of random activations."""
    generator = torch.Generator().manual_seed(0)
    tokens = config.head_dim
    rope = PageRotation(config)
    moments = KVMoments.of(config)
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    q, k, v = (torch.randn(1, n, tokens, config.head_dim, generator=generator) for n in heads)
    moments.add(q, k, v, rope)
    return moments


def formats(config: ModelConfig) -> Mapping[str, KVFormat]:
    """Return all formats for a model of one layer, with calibrations of random activations.

    ``fdc`` and ``palu`` keep half of the dimensions; the options of ``shard`` are the defaults.
    ``lowrank`` is that of a model whose factor pairs keep `KEEP` of the parameters.
    """
    device, dtype = torch.device("cpu"), torch.bfloat16
    exact = DenseFormat.create(config, device, dtype)
    layers = layer_shapes(random_checkpoint(config, KEEP, device="cpu", on_demand=True))
    latents = LowRankFormat(config, exact, layers, device, dtype)
    moments = [_moments(config)]
    half = config.head_dim // 2
    compressed: dict[str, CompressedFormat] = {
        **{name: create(config) for name, create in COMPRESSED.items()},
        f"fdc, rank {half}": fdc.FdcFormat(
            config, fdc.calibrate(moments, fdc.FdcOptions(rank=half), "")
        ),
        f"palu, rank {half}": palu.PaluFormat(
            config, palu.calibrate(moments, palu.PaluOptions(rank=half), "")
        ),
        "shard": shard.ShardFormat(config, shard.calibrate(moments, shard.ShardOptions(), "")),
    }
    windowed = {name: WindowedFormat(exact, found) for name, found in compressed.items()}
    return {"dense": exact, f"lowrank, keep {KEEP:g}": latents, **windowed}


def occupied(plan: PagePlan, prompt: int, decoded: int) -> PageCount:
    """Return the pages of a sequence on a decode worker.

    The sequence has received its prompt's KV and has then run ``decoded`` decode steps. For each
    page group, return the largest number of pages held after any of the last ``page_size`` steps.
    """
    pages = SequencePages(plan, plan.each(_CAPACITY))
    tokens = [0] * prompt
    request = Request("r", tuple(tokens), prompt, SamplingParams(), decoded + 1)
    sequence = SequenceState(request, 0, 0, tokens, prompt + decoded + 1)
    group = SequenceGroup(Purpose.RECEIVE, [sequence])
    pages.admit(group)
    held = [_held(sequence)]
    sequence.tokens.append(0)  # the first output token
    for _ in range(decoded):
        for lacking in plan.lacking([sequence]):
            pages.grow(lacking, plan.missing(lacking))
        held.append(_held(sequence))
        sequence.tokens.append(0)
        pages.release_left(sequence, len(sequence.tokens) - 1)
    return PageCount(*map(max, zip(*held[-plan.page_size :], strict=True)))


def _held(sequence: SequenceState) -> list[int]:
    return [sum(page != FREED for page in table) for table in sequence.page_tables]


@dataclass(frozen=True)
class Occupation:
    """Bytes of one sequence in all layers.

    Attributes:
        tokens: tokens whose KV is held.
        pages: pages of each page group.
        size: bytes of these pages.
        dense: bytes of K and V of these tokens in bf16.
    """

    tokens: int
    pages: PageCount
    size: int
    dense: int

    @property
    def ratio(self) -> float:
        """Compression ratio."""
        return self.dense / self.size


def occupation(
    kv_format: KVFormat, config: ModelConfig, prompt: int, decoded: int = 0
) -> Occupation:
    """Return the bytes of a sequence with ``prompt`` received and ``decoded`` further tokens."""
    layout = CacheLayout.of(kv_format, num_layers=config.num_layers, page_size=PAGE)
    pages = occupied(layout.plan, prompt, decoded)
    tokens = prompt + decoded
    dense = tokens * config.num_layers * 2 * 2 * config.num_kv_heads * config.head_dim
    return Occupation(tokens, pages, layout.page_bytes.of(pages), dense)


def per_compressed_token(kv_format: KVFormat, config: ModelConfig) -> float:
    """Return the compression ratio of tokens in compressed pages; 1 for a format without them."""
    layout = CacheLayout.of(kv_format, num_layers=config.num_layers, page_size=PAGE)
    sizes = layout.page_bytes.groups
    return sizes[0] / sizes[-1]


def rows(config: ModelConfig, decoded: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, the header first."""
    longer = f"8192 + {decoded}"
    yield "format", "B/token", "stored token", *map(str, CONTEXTS), longer
    for name, kv_format in formats(config).items():
        layout = CacheLayout.of(kv_format, num_layers=1, page_size=PAGE)
        ratios = [occupation(kv_format, config, tokens).ratio for tokens in CONTEXTS]
        ratios.append(occupation(kv_format, config, 8192, decoded).ratio)
        size = int(token_bytes(layout.page_bytes))
        compressed = per_compressed_token(kv_format, config)
        yield name, f"{size:,}", f"{compressed:.2f}x", *(f"{ratio:.2f}x" for ratio in ratios)
    published = [f"{ratio:.2f}x" for ratio in SHARD_PUBLISHED.values()]
    yield "Shard, published", "352", "11.64x", *published, f"{SHARD_PUBLISHED_DECODED:.1f}x"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = argparse.ArgumentParser(
        prog="python -m runtime.offline.bench kv-bytes",
        description="Compression ratios of one sequence by KV format and tokens.",
    )
    arguments.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    arguments.add_argument("--decoded", type=int, default=2048, help="tokens of the last column")
    return arguments


def main() -> None:
    args = parser().parse_args()
    table = list(rows(one_layer(args.model), args.decoded))
    print(f"one layer of {args.model}, pages of {PAGE} tokens, {pages_for(8192, PAGE)} for 8,192")
    print("| " + " | ".join(table[0]) + " |")
    print("|" + "---|" * len(table[0]))
    for row in table[1:]:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
