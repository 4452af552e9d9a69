"""Cache layouts: plane groups, sizes, and rejected planes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.errors import KVFormatError
from runtime.kv.cache import CacheLayout, PagedCache
from runtime.kv.compressed import COMPRESSED
from runtime.kv.format import Plane
from runtime.pages.plan import PageCount
from runtime.pages.sizes import token_bytes
from tests.runtime.tiny import CONFIG, tiny_model

HEADS, PAGE = 3, 16


def plane(name: str, dtype: torch.dtype, dim: int, **changes: Any) -> Plane:
    return Plane(name, dtype, (HEADS, PAGE, dim), **changes)


K = plane("k", torch.bfloat16, 8)
CODES = plane("v", torch.int8, 8, encodable=False)
SCALES = plane("v_scale", torch.float32, 1, encodable=False)


def test_dense_planes_are_one_group() -> None:
    layout = tiny_model().layout
    (group,) = layout.groups
    assert group.members == ((("k", 0), ("v", 1)), (("k", 2), ("v", 3)))
    assert group.runs == (range(2),)
    assert group.count(0, 2) == 4
    per_token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert token_bytes(layout.page_bytes) == per_token


def test_planes_of_different_dtype_or_dim_are_different_groups() -> None:
    layout = CacheLayout(PAGE, HEADS, ((K, CODES, SCALES),) * 2)
    assert [(g.dtype, g.dim, g.encodable) for g in layout.groups] == [
        (torch.bfloat16, 8, True),
        (torch.int8, 8, False),
        (torch.float32, 1, False),
    ]
    assert [g.members[1] for g in layout.groups] == [(("k", 3),), (("v", 4),), (("v_scale", 5),)]
    assert token_bytes(layout.page_bytes) == 2 * HEADS * (16 + 8 + 4)


def test_layers_with_different_dims_have_their_own_runs() -> None:
    """An example is a format that compresses each layer to a different rank."""
    narrow = plane("k", torch.bfloat16, 4)
    layout = CacheLayout(PAGE, HEADS, ((K,), (narrow,), (K,), (K,)))
    wide, small = layout.groups
    assert wide.runs == (range(1), range(2, 4))
    assert small.runs == (range(1, 2),)
    assert (wide.count(0, 4), small.count(0, 4)) == (3, 1)


def test_cache_has_the_planes_of_its_layout() -> None:
    cache = PagedCache(CacheLayout(PAGE, HEADS, ((K, CODES), (K,))), PageCount(5))
    assert [tuple(p.shape) for p in cache.planes] == [(5, HEADS, PAGE, 8)] * 3
    assert [p.dtype for p in cache.planes] == [torch.bfloat16, torch.int8, torch.bfloat16]
    assert [p.data_ptr() for p in cache.layer(0)] == [p.data_ptr() for p in cache.planes[:2]]
    assert cache.layer(1)[0] is cache.planes[2]


@pytest.mark.parametrize(
    "planes",
    [
        (K, K),
        (),
        (Plane("k", torch.bfloat16, (HEADS + 1, PAGE, 8)),),
        (Plane("k", torch.bfloat16, (HEADS, PAGE + 1, 8)),),
        (Plane("k", torch.bfloat16, (HEADS, PAGE, 0)),),
    ],
)
def test_malformed_planes_are_refused(planes: tuple[Plane, ...]) -> None:
    with pytest.raises(KVFormatError):
        CacheLayout(PAGE, HEADS, ((K,), planes))


ENCODED = (
    plane("k_codes", torch.uint8, 5, encodable=False, group=COMPRESSED),
    plane("latents", torch.bfloat16, 8, group=COMPRESSED),
    plane("scale", torch.float32, 1, encodable=False, group=COMPRESSED),
)


def test_planes_of_bytes_that_are_encoded_into_are_parts_of_a_block() -> None:
    layout = CacheLayout(PAGE, HEADS, ((K, *ENCODED),) * 2)
    assert [(g.dim, g.page_group, g.is_block, g.in_block) for g in layout.groups] == [
        (8, 0, False, False),
        (8, 1, False, False),
        (5 + 4, 1, True, False),
        (5, 1, False, True),
        (1, 1, False, True),
    ]
    assert layout.groups[2].members == ((("block", 2),), (("block", 5),))
    cache = PagedCache(layout, PageCount(5, 4))
    assert [tuple(tensor.shape) for tensor in cache.tensors[:3]] == [
        (5, HEADS, PAGE, 8),
        (4, HEADS, PAGE, 8),
        (4, HEADS, PAGE, 9),
    ]
    _, codes, latents, scales = cache.layer(0)
    assert [tuple(p.shape[1:]) for p in cache.layer(0)] == [p.shape for p in (K, *ENCODED)]
    assert latents is cache.tensors[1]
    assert codes[0].is_contiguous()
    assert scales[3].is_contiguous()
    codes[1], scales[1] = 7, 0.5
    block = cache.tensors[2].flatten(1)
    per_page = HEADS * PAGE
    for name, group in (("k_codes", 3), ("scale", 4)):
        members = layout.groups[group].members[0]
        assert [member for member, _ in members] == [name]
        part = cache.sendable[members[0][1]]
        assert part.data_ptr() in (codes.data_ptr(), scales.data_ptr())
    assert (block[1, : 5 * per_page] == 7).all()
    assert (block[1, 5 * per_page :].view(torch.float32) == 0.5).all()
    assert not block[[0, 2, 3]].any()
    assert layout.page_bytes.groups[1] == 2 * PAGE * HEADS * (5 + 16 + 4)


@pytest.mark.parametrize(
    ("page_size", "planes"),
    [
        (PAGE, ENCODED[:2]),  # one plane of bytes
        (3, ENCODED),  # parts of a block would not be aligned
        (PAGE, (CODES, SCALES)),  # pages that are not encoded into
    ],
)
def test_other_planes_are_tensors_of_their_own(page_size: int, planes: tuple[Plane, ...]) -> None:
    own = tuple(replace(p, shape=(HEADS, page_size, p.shape[2])) for p in planes)
    layout = CacheLayout(page_size, HEADS, (own,))
    assert [tensor.planes for tensor in layout.tensors] == [(p,) for p in own]
    assert not any(group.is_block for group in layout.groups)
