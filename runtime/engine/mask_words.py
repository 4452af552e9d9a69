"""Encoding of masks as the words of a message to other ranks."""

import numpy as np

from runtime.engine.shared import Words
from runtime.grammar.masks import TokenMasks


def mask_words(step: int, masks: TokenMasks) -> Words:
    """Return the number of a step and its masks as words.

    They are the number, the number of masks, the number of int32 words of each mask, the rows, and
    the int32 words of all masks, two in each word.
    """
    count, width = masks.words.shape
    body = masks.words.ravel()
    if len(body) % 2:
        body = np.append(body, np.int32(0))
    head = np.array([step, count, width, *masks.rows], np.int64)
    return np.concatenate([head, body.view(np.int64)])


def masks_of_words(words: Words) -> tuple[int, TokenMasks]:
    """Return the number of a step and its masks, see `mask_words`."""
    step, count, width = words[:3].tolist()
    rows = words[3 : 3 + count].tolist()
    body = words[3 + count :].view(np.int32)[: count * width]
    return step, TokenMasks(rows, body.reshape(count, width))
