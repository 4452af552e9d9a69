"""Hashes of the first tokens of a prompt, by which routers recognize prompts with equal beginnings.

The hash of a block covers all tokens up to its end, and a salt: it is equal for two prompts only if
they have the same salt and the same tokens up to there. A block has `BLOCK_TOKENS` tokens, or
about an eighth of the tokens before it if that is more. `MAX_BLOCKS` hashes thus describe prompts
of up to `ENDS[-1]` tokens. The length of a common beginning is underestimated by less than one
block. Fewer hashes are computed than with one for each KV page. Hashes have 64 bits: a collision
can lead to a worse placement, but not to wrong KV, because workers find KV by longer hashes.

Gateways send the hashes in the header `HEADER` of a placement request. A field in the body would
be refused by routers of earlier releases, but they ignore unknown headers. The header is optional,
so gateways of earlier releases work, too.
"""

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

from services.common.token_ids import TOKEN_BYTES, count_tokens

HEADER = "x-headrace-prefix"
BLOCK_TOKENS = 64
"""Minimum number of tokens in a block."""
MAX_BLOCKS = 64
"""Maximum number of hashes of a prompt."""
HASH_BYTES = 8
_GROWTH = 8
_SALT_BYTES = 4
"""Size of the length of the salt, which is hashed before it."""


def _ends() -> tuple[int, ...]:
    ends = [0]
    while len(ends) <= MAX_BLOCKS:
        grown = ends[-1] // _GROWTH // BLOCK_TOKENS * BLOCK_TOKENS
        ends.append(ends[-1] + max(BLOCK_TOKENS, grown))
    return tuple(ends[1:])


ENDS = _ends()
"""Number of tokens up to the end of each block."""
LENGTHS = tuple(end - begin for begin, end in pairwise((0, *ENDS)))
"""Number of tokens in each block."""


def prefix_hashes(packed: bytes, salt: bytes = b"") -> tuple[bytes, ...]:
    """Return the hash of each whole block of a prompt, the first block first.

    Args:
        packed: token ids of the prompt, see `pack_tokens`.
        salt: prompts with different salts share no KV.
    """
    number = bisect_right(ENDS, count_tokens(packed))
    content = memoryview(packed)
    chain = blake2b(len(salt).to_bytes(_SALT_BYTES, "little") + salt, digest_size=HASH_BYTES)
    hashes = []
    for begin, end in pairwise((0, *ENDS[:number])):
        chain.update(content[begin * TOKEN_BYTES : end * TOKEN_BYTES])
        hashes.append(chain.digest())
    return tuple(hashes)


def encode_hashes(hashes: Sequence[bytes]) -> str:
    """Return hashes as the value of `HEADER`."""
    return b"".join(hashes).hex()


def decode_hashes(value: str) -> tuple[bytes, ...]:
    """Return the hashes in the value of `HEADER`, at most `MAX_BLOCKS`.

    Raises:
        ValueError: the value does not consist of whole hashes in hexadecimal digits.
    """
    packed = bytes.fromhex(value)
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a sequence of hashes")
    packed = packed[: MAX_BLOCKS * HASH_BYTES]
    return tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
