"""Inline PTX of the attention kernels, emulated: Triton's interpreter does not run it.

The asserted values are what the functions return for the interpreter.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.kv.stream.levels import lloyd_max as levels_of_bits
from runtime.kv.transforms import unpack
from runtime.kv.two_bits import LEVELS as LEVELS_OF_CODES
from tests.runtime.kv.ptx_operations import LANES
from tests.runtime.kv.warp import Memory, run_ptx

pytest.importorskip("triton")


def run(ptx: object, outputs: int, *inputs: int) -> list[int]:
    """Run a block of PTX on words and return its outputs."""
    words = [np.full(LANES, word, np.uint32) for word in inputs]
    found = run_ptx(Memory(), str(getattr(ptx, "value", ptx)), outputs, words)
    return [int(word[0]) for word in found]


def halves(word: int) -> Tensor:
    """Return the two fp16 numbers in a word."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.uint16).view(torch.float16)


def bf16(words: list[int]) -> Tensor:
    """Return the bf16 numbers of words, fp32 `[n, 2]`."""
    pairs = [[word & 0xFFFF, word >> 16] for word in words]
    return torch.tensor(pairs, dtype=torch.uint16).view(torch.bfloat16).float()


def random_bytes(count: int) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def word_of(stored: Tensor) -> int:
    return int.from_bytes(bytes(stored.tolist()), "little")


def test_values_of_shard_are_levels() -> None:
    """Register k has byte k % 4 of parts k // 4 and 2 + k // 4."""
    from runtime.kv.k4v2.kernels import UNIT
    from runtime.kv.shard.kernels import LEVELS

    for stored in random_bytes(80).view(-1, 4):
        levels = torch.tensor(LEVELS_OF_CODES)[unpack(stored, 2).long()].view(4, 4)  # part, byte
        expected = torch.stack([levels[[k // 4, 2 + k // 4], k % 4] for k in range(8)])
        found = bf16(run(LEVELS, 8, word_of(stored))) * UNIT.value
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_values_of_k4v2_are_levels() -> None:
    from runtime.kv.k4v2.kernels import UNIT, UNPACK

    for stored in random_bytes(80).view(-1, 4):  # two words of an even and an odd byte
        levels = torch.tensor(LEVELS_OF_CODES)[unpack(stored, 2).long()].view(4, 2, 2)
        expected = levels.permute(0, 2, 1).reshape(8, 2)  # part, byte, word
        found = bf16(run(UNPACK, 8, word_of(stored))) * UNIT.value
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_codes_of_shard_are_nibbles() -> None:
    from runtime.kv.shard.kernels import SPLIT

    stored = random_bytes(4)
    low, high = run(SPLIT, 2, word_of(stored))
    assert list(low.to_bytes(4, "little")) == (stored & 15).tolist()
    assert list(high.to_bytes(4, "little")) == (stored >> 4).tolist()
    codes = torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.float() * 512, torch.arange(16.0))


def test_levels_of_stream4() -> None:
    from runtime.kv.stream.kernels import LEVELS

    levels = levels_of_bits(4)[0].to(torch.bfloat16).float()
    for first in range(16):
        stored = (torch.arange(4) * 5 + first) % 16 | (torch.arange(4) * 3 + first) % 16 << 4
        nibbles = levels[unpack(stored.to(torch.uint8), 4).long()].view(2, 2, 2)
        expected = nibbles.permute(0, 2, 1).reshape(4, 2)  # nibble, byte, word
        found = run(LEVELS, 4, word_of(stored))
        assert torch.equal(bf16(found), expected)


def test_keys_of_shard_are_rotated() -> None:
    from runtime.kv.shard.kernels import ROTATE

    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(6, 2, generator=generator).half()
    words = [int(low) | int(high) << 16 for low, high in pairs.view(torch.uint16).tolist()]
    first, second, offset1, offset2, cos, sin = pairs.float()
    first, second = first + offset1, second + offset2
    expected = torch.stack((first * cos - second * sin, second * cos + first * sin))
    found = torch.stack([halves(word).float() for word in run(ROTATE, 2, *words)])
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
