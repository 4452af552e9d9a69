"""Requests whose logits are not finite, and the self-test that detects a damaged worker."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.v1 import decode_pb2, error_pb2
from runtime.checkpoint import Checkpoint, write_checkpoint
from runtime.errors import NotFinite
from runtime.models.build import build_model
from services.common.errors import SettingsError
from services.worker.loading import load_worker
from services.worker.self_test import check_logits
from services.worker.settings import WorkerSettings
from tests.runtime.tiny import engine_of, prompt_of, tiny_checkpoint
from tests.services import workers
from tests.services.workers import (
    LIMIT_S,
    Decode,
    Prefill,
    Site,
    message_of,
    output_of,
    start_stream,
    until,
)

TOKENS, SOUND_TOKENS = 40, 21
_numbers = itertools.count(1)  # the ids of an engine's sequences must differ
POISON = next(
    token for token in prompt_of(TOKENS) if token > 8 and token not in prompt_of(SOUND_TOKENS)
)


def damaged(*tokens: int) -> Checkpoint:
    """Return a checkpoint with NaN in the embeddings of some tokens."""
    checkpoint = tiny_checkpoint()
    embedding = checkpoint.embedding.clone()
    embedding[list(tokens)] = torch.nan
    return replace(checkpoint, embedding=embedding)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "checkpoint_for", lambda _: damaged(POISON))


async def error_of(worker: Decode | Prefill, tokens: int, prefill: Prefill | None = None) -> int:
    """Return the error code of a stream, 0 if it ends without one."""
    start = decode_pb2.StartStream(
        stream=next(_numbers),
        epoch=worker.worker.identity.epoch,
        prefill=prefill.address if prefill else None,
        deadline_s=LIMIT_S,
        request=message_of(tokens),
    )
    session = start_stream(worker.worker.service, start)
    await until(lambda: worker.worker.idle)
    return output_of(session).error.code


@pytest.mark.usefixtures("poisoned")
async def test_error_code_says_that_the_logits_are_not_finite(site: Site) -> None:
    prefill, decode = await site.prefill(), await site.decode()
    assert await error_of(decode, TOKENS, prefill) == error_pb2.ERROR_CODE_NOT_FINITE
    assert await error_of(prefill, TOKENS) == error_pb2.ERROR_CODE_NOT_FINITE
    assert await error_of(decode, SOUND_TOKENS, prefill) == 0


@pytest.mark.usefixtures("poisoned")
async def test_worker_stays_ready_after_a_request_with_non_finite_logits(site: Site) -> None:
    prefill = await site.prefill()
    for _ in range(3):
        await error_of(prefill, TOKENS)
    await until(lambda: not prefill.worker.self_test._running)
    assert prefill.worker.not_ready is None
    assert prefill.metric("headrace_worker_not_finite_total") == 3


async def test_worker_whose_weights_were_damaged_is_not_ready_until_they_are_sound(
    site: Site,
) -> None:
    decode = await site.decode(colocated=True)
    cosines, _ = decode.loaded.rank.executor.model.rope
    sound = cosines.clone()
    cosines.fill_(torch.nan)
    assert await error_of(decode, TOKENS) == error_pb2.ERROR_CODE_NOT_FINITE
    await until(lambda: decode.worker.not_ready is not None)
    assert decode.worker.not_ready == "the logits of a test prompt are not finite"
    cosines.copy_(sound)
    decode.worker.observe()  # runs the test again
    await until(lambda: decode.worker.not_ready is None)
    assert decode.worker.idle


def test_worker_does_not_start_if_the_embedding_of_any_token_is_damaged(tmp_path: Path) -> None:
    write_checkpoint(damaged(POISON), tmp_path / "model")
    with pytest.raises(SettingsError, match=r"cannot serve .*NaN or infinite"):
        load_worker(WorkerSettings.load(["--model", str(tmp_path / "model")]), decodes=True)


def test_worker_does_not_start_with_damaged_weights() -> None:
    sound = engine_of(build_model(tiny_checkpoint()))
    check_logits(sound)
    assert sound.scheduler.pages.free == sound.scheduler.pages.total
    with pytest.raises(NotFinite, match="test prompt"):
        check_logits(engine_of(build_model(damaged(3))))
