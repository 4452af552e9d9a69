"""Eviction from long prompts works on a few KV heads at a time, so that it needs little memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.engine import Add
from runtime.kv import eviction as scores
from runtime.models.build import build_model
from runtime.steps import eviction
from runtime.steps.eviction import PromptEviction
from tests.runtime.tiny import CONFIG, drive, engine_of, request_of, tiny_checkpoint

WIDE = replace(CONFIG, num_heads=8, num_kv_heads=8, head_dim=64)
TOKENS = 200
HEAD_BYTES = 4 * WIDE.head_dim * TOKENS
"""Bytes of the fp32 keys of one KV head."""


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the largest tensor that operations allocate."""

    nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        for tensor in _tensors((made,)):
            if tensor.untyped_storage().data_ptr() not in given:  # neither a view nor in place
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        return made


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


@pytest.mark.parametrize("kv_format", ["dense", "k4v2"])
def test_memory_of_an_eviction_is_that_of_one_head(
    kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(tiny_checkpoint(config=WIDE), kv_format=kv_format)
    stored = 32 * model.layout.plan.encodes
    requests = [Add(request_of(f"r{n}", TOKENS, 12, seed=n)) for n in range(2)]
    expected = drive(engine_of(model, stored=stored, kv_eviction=0.5), *requests)

    largest = LargestTensor()  # type: ignore[no-untyped-call]
    evict = PromptEviction._evict

    def watched(self: PromptEviction, *arguments: Any) -> None:
        with largest:
            evict(self, *arguments)

    for module in (eviction, scores):
        monkeypatch.setattr(module, "MAX_ELEMENTS", 1)
    monkeypatch.setattr(PromptEviction, "_evict", watched)
    found = drive(engine_of(model, stored=stored, kv_eviction=0.5), *requests)
    assert found.tokens == expected.tokens, "the division into heads does not change what is kept"
    assert 0 < largest.nbytes <= HEAD_BYTES
