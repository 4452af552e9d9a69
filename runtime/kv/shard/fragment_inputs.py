"""Tensors that `runtime.kv.shard.fragments` reads, in the order in which lanes load them."""

import torch
from torch import Tensor

from runtime.kv.rotation import PageRotation
from runtime.kv.shard.decoder import KeyDecoder

TILE = 64
"""Tokens of a compressed tile."""
REACH = 8 * TILE
"""Number of consecutive tokens that are rotated relative to one position."""
TOKEN, DIMS = 96, 128
"""Bytes of K of a token, and dimensions of a head, that the kernel supports."""
STEPS = 2 * TOKEN // 32
"""Steps of 32 codes of the matmul with the weights."""
WEIGHTS = 2 * TOKEN * DIMS
"""Bytes of the weights of a KV head."""
_WORD = 4
"""Bytes of codes that a lane holds in a step."""


def lane_weights(decoder: KeyDecoder) -> tuple[Tensor, Tensor]:
    """Return the weights that map codes to keys, and the offsets of their products.

    Returns:
        - e4m3 ``[kv_heads, steps / 2, dim, 4, 16]``: for each of two steps, 16 weights of the low
          nibbles, then 16 weights of the high nibbles. A step has the 16 bytes that four lanes
          hold, four each, see `fragments.load_codes`. The four groups of 16 bytes of a dimension
          are swizzled as `wgmma` expects.
        - fp16 ``[kv_heads, 4, dim / 4]``: for each t, the offsets of dimensions ``8 i + 2 t`` and
          ``8 i + 2 t + 1``, for all i.
    """
    weights, offsets, _ = decoder.kernel_inputs()
    heads, _, dim, size = weights.shape
    chunks = torch.split(torch.arange(size), 64)
    own = torch.cat([c.view(4, -1, _WORD).transpose(0, 1) for c in chunks])  # [steps, t, byte]
    found = weights.view(torch.uint8)[..., own.flatten().to(weights.device)]
    found = found.view(heads, 2, dim, -1, 2, 16)  # [heads, nibble, dim, steps / 2, step, byte]
    found = found.permute(0, 3, 2, 4, 1, 5).reshape(heads, -1, dim, 4, 16)
    of_lanes = offsets.view(heads, -1, 4, 2).transpose(1, 2).flatten(2)
    row = torch.arange(dim, device=found.device)[:, None]
    swizzled = torch.arange(4, device=found.device) ^ (row // 2 % 4)  # [dim, 4]
    return found[:, :, row, swizzled].view(weights.dtype), of_lanes.half().contiguous()


def lane_cos_sin(rotation: PageRotation) -> Tensor:
    """Return cosines and sines of the first REACH positions, in the order in which lanes load them.

    Returns:
        fp16 ``[pages, dim / 16, 32, 8]``. Element ``[page, j, 4 g + t]`` has tokens g and g + 8 of
        the page: for each token, the cosines of pairs ``8 j + 2 t`` and ``8 j + 2 t + 1`` of
        dimensions, then their sines.
    """
    tables = torch.stack(rotation.inverse)  # [2, context, dim / 2]
    rows = torch.arange(REACH, device=tables.device).clamp_max(tables.shape[1] - 1)
    lanes = tables[:, rows].view(2, REACH // 16, 2, 8, -1, 4, 2)
    # [page, j, g, t, row, cos or sin, pair]
    lanes = lanes.permute(1, 4, 3, 5, 2, 0, 6).reshape(REACH // 16, -1, 32, 8)
    return lanes.half().contiguous()
