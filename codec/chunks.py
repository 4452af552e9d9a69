"""Which elements of a plane each chunk holds: the table that the backends walk."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec.format import CHUNK, Geometry


def chunk_table(pages: Tensor, geometry: Geometry) -> NDArray[np.int64]:
    """int64 `[chunks, 4]`, in the chunks' order: page id, head, first element in the run, elements.

    Args:
        pages: int64 `[geometry.num_pages]`, the page ids in token order.
    """
    runs = [
        (page, 0, start, min(CHUNK, run - start))
        for page, run in zip(pages.tolist(), geometry.head_runs, strict=True)
        for start in range(0, run, CHUNK)
    ]
    one_head = np.array(runs, dtype=np.int64).reshape(-1, 4)
    table = np.tile(one_head, (geometry.kv_heads, 1))
    table[:, 1] = np.repeat(np.arange(geometry.kv_heads), len(one_head))
    return table
