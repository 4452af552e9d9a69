"""A gateway whose tokenizer does not match the workers' model is not ready: it refuses requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.model_source import resolve_model
from services.tokenizer.identity import tokenizer_hash
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
        "tokenizer_hash": tokenizer_hash(resolve_model("smollm2-135m")),
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 32_000}, "it has 49152 tokens, the model of the workers 32000"),
        ({"eos_token_ids": [7]}, "token 7 ends the output"),
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
    assert outcomes(site) == [("cancelled", None)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"vocab_size": 50_000}, {"eos_token_ids": []}, {"tokenizer_hash": ""}],
    ids=["same", "padded embedding", "no EOS", "no tokenizer"],
)
async def test_fitting_tokenizer_is_ready(site: Site, changes: dict[str, Any]) -> None:
    site.worker.script = say(5)
    site.router.model_info = model_of(site, **changes)
    assert (await site.http.get("/ready")).status_code == 200
    assert (await completion(site)).status_code == 200


def test_hash_is_that_of_the_vocabulary(tmp_path: Path) -> None:
    packaged = resolve_model("smollm2-135m")
    load_tokenizer(packaged).save(tmp_path)
    assert tokenizer_hash(tmp_path) == tokenizer_hash(packaged)
    file = tmp_path / "tokenizer.json"
    description = json.loads(file.read_text())
    vocab = description["model"]["vocab"]
    vocab["Ġthe"], vocab["Ġof"] = vocab["Ġof"], vocab["Ġthe"]
    file.write_text(json.dumps(description))
    assert tokenizer_hash(tmp_path) not in ("", tokenizer_hash(packaged))
    file.unlink()
    assert tokenizer_hash(tmp_path) == ""
