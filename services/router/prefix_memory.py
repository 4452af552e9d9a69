"""The beginnings of prompts that a router has placed on a worker, by hash."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from services.common.prefix_hashes import ENDS, LENGTHS


class PrefixMemory:
    """Blocks of prompts whose KV a worker is expected to have cached.

    The least recently placed blocks are forgotten first; of one prompt, a block is forgotten before
    the blocks that precede it. Thus, if a block is known, all blocks before it are known, too.

    Args:
        max_blocks: maximum number of blocks; 0: nothing is remembered.
        max_tokens: maximum number of tokens of all blocks: those that fit in the worker's pages.
    """

    def __init__(self, max_blocks: int, max_tokens: int) -> None:
        self._max_blocks = max_blocks
        self._max_tokens = max_tokens
        # Hashes with the number of tokens in their blocks, the next ones to forget first.
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        # Ids of placements, by blocks that are in the prompt of only that placement.
        self._placements: dict[bytes, str] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def tokens(self) -> int:
        """Number of tokens of the remembered blocks."""
        return self._tokens

    def known_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return how many tokens at the beginning of a prompt are remembered.

        Args:
            hashes: see `services.common.prefix_hashes.prefix_hashes`.
        """
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return 0
        # The last blocks are unknown, and all blocks before them are known.
        unknown = bisect_left(hashes[::-1], True, key=blocks.__contains__)
        return ENDS[len(hashes) - unknown - 1]

    def remember(self, hashes: Sequence[bytes], placement_id: str) -> None:
        """Remember the blocks of a prompt that is placed on the worker."""
        blocks = self._blocks
        for block, length in reversed(list(zip(hashes, LENGTHS, strict=False))):
            if block in blocks:
                blocks.move_to_end(block)
                self._placements.pop(block, None)
            else:
                blocks[block] = length
                self._placements[block] = placement_id
                self._tokens += length
        while len(blocks) > self._max_blocks or self._tokens > self._max_tokens:
            block, length = blocks.popitem(last=False)
            self._placements.pop(block, None)
            self._tokens -= length

    def forget(self, hashes: Sequence[bytes], placement_id: str) -> None:
        """Forget the blocks of a prompt that the worker will not get, except shared blocks.

        Blocks that are also in another prompt are kept, and so are all blocks before them.
        """
        for block in hashes:
            if self._placements.get(block) == placement_id:
                del self._placements[block]
                self._tokens -= self._blocks.pop(block)
