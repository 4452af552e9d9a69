"""A gateway whose tokenizer does not match the workers' model is not ready: it refuses requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.model_source import resolve_model
from services.tokenizer.identity import TokenizerIdentity
from services.tokenizer.loading import load_tokenizer
from tests.services.gateway.conftest import Site
from tests.services.gateway.failures import completion, outcomes
from tests.services.gateway.fakes import say


def model_of(site: Site, **changes: Any) -> dict[str, Any]:
    """Return the registered model of workers that fit the gateway, with changes."""
    return {
        "name": site.model.name,
        "context_length": 8192,
        "vocab_size": site.model.tokenizer.vocab_size,
        "max_logprobs": 20,
        "eos_token_ids": list(site.model.tokenizer.eos_ids),
        "model_hash": "m",
        "tokenizer_hash": site.model.identity.hash,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 32_000}, "it has 49152 tokens, the model of the workers 32000"),
        ({"tokenizer_hash": "0" * 64}, "its vocabulary is not that of the workers"),
    ],
)
async def test_unfit_tokenizer_is_not_ready(
    site: Site, changes: dict[str, Any], reason: str
) -> None:
    site.worker.script = say(5)
    site.router.model_info = model_of(site, **changes)
    ready = await site.http.get("/ready")
    assert ready.status_code == 503
    assert reason in ready.json()["reason"]
    refused = await completion(site)
    assert refused.status_code == 503
    assert reason in refused.json()["error"]["message"]
    assert site.worker.streams == []
    await site.router.settled()
    # Each attempt is placed again, and no worker is blamed.
    assert set(outcomes(site)) == {("failed", None)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_size": 50_000},
        {"eos_token_ids": []},
        {"eos_token_ids": [7]},
        {"tokenizer_hash": ""},
    ],
    ids=["same", "padded embedding", "no EOS", "other EOS", "no tokenizer"],
)
async def test_fitting_tokenizer_is_ready(site: Site, changes: dict[str, Any]) -> None:
    site.worker.script = say(5)
    site.router.model_info = model_of(site, **changes)
    assert (await site.http.get("/ready")).status_code == 200
    assert (await completion(site)).status_code == 200


@pytest.mark.parametrize("count", [0, 1])
async def test_output_ends_with_the_tokens_that_the_workers_registered(
    site: Site, count: int
) -> None:
    """The gateway does not derive them from its own files, which may have more."""
    ends = list(site.model.tokenizer.eos_ids[:count])
    site.worker.script = say(5)
    site.router.model_info = model_of(site, eos_token_ids=ends)
    assert (await completion(site)).status_code == 200
    assert list(site.worker.streams[0].start.request.stop_token_ids) == ends


async def test_ends_of_the_tokenizer_are_added_if_the_workers_have_none(site: Site) -> None:
    ends = site.model.tokenizer.eos_ids
    site.worker.script = say(5)
    site.router.model_info = model_of(site, eos_token_ids=ends[:1], tokenizer_hash="")
    assert (await completion(site)).status_code == 200
    assert tuple(site.worker.streams[0].start.request.stop_token_ids) == ends


def test_hash_is_that_of_the_vocabulary(tmp_path: Path) -> None:
    packaged = TokenizerIdentity.read(resolve_model("smollm2-135m"))
    load_tokenizer(resolve_model("smollm2-135m")).save(tmp_path)
    assert TokenizerIdentity.read(tmp_path) == packaged
    assert packaged is not None
    file = tmp_path / "tokenizer.json"
    description = json.loads(file.read_text())
    vocab = description["model"]["vocab"]
    vocab["Ġthe"], vocab["Ġof"] = vocab["Ġof"], vocab["Ġthe"]
    file.write_text(json.dumps(description))
    changed = TokenizerIdentity.read(tmp_path)
    assert changed is not None
    assert changed.hash != packaged.hash
    file.unlink()
    assert TokenizerIdentity.read(tmp_path) is None
