"""Deployments with compressed KV: pages arrive unchanged, tokens equal those of one worker."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.model_source import DEFAULT_MODEL
from services.offline.calibrate_flags import Given
from services.offline.kv_calibration import calibrate_kv
from tests.harness.deployment import Running, deployed
from tests.harness.random_model import RandomModel
from tests.programs.equality import digests

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

REQUESTS = 10


@pytest.fixture(scope="module")
def model() -> Path:
    return RandomModel("tiny").ensure()


@pytest.fixture(scope="module")
def factorized() -> Path:
    return RandomModel("tiny", 0.6).ensure()


def ask(running: Running, number: int) -> list[object]:
    """Send a request whose length depends on its number; return the logprobs of its tokens."""
    prompt = [100 + (7919 * number + 31 * index) % 4000 for index in range(40 + 97 * number)]
    answer = httpx.post(
        f"{running.url}/v1/completions",
        json={
            "model": running.model,
            "prompt": prompt,
            "max_tokens": 40,
            "ignore_eos": True,
            "seed": number,
            "logprobs": 1,
        },
        timeout=60,
        trust_env=False,
    ).json()
    tokens: list[object] = answer["choices"][0]["logprobs"]["tokens"]
    return tokens


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a calibration of fdc, with ranks that differ between heads."""
    path = tmp_path_factory.mktemp("calibration") / "fdc"
    given = Given(text={"tokens": 1024}, options={"removal_rate": 0.2})
    calibrate_kv(str(model), DEFAULT_MODEL, "fdc", given, path, device="cpu")
    return path


@pytest.mark.parametrize(
    ("name", "eviction"),
    [("fp8", "0"), ("fdc", "0"), ("dense", "0.5"), ("lowrank", "0")],
)
def test_disaggregated_tokens_equal_those_of_one_worker(
    model: Path, name: str, eviction: str, request: pytest.FixtureRequest
) -> None:
    if name == "fdc":
        name += f":{request.getfixturevalue('calibration')}"
    if name == "lowrank":
        model = request.getfixturevalue("factorized")
    flags = ("--model", str(model), "--kv-format", name, "--kv-eviction", eviction)
    with deployed(*flags, "--colocated") as running:
        expected = [ask(running, number) for number in range(REQUESTS)]
    environment = {"HEADRACE_PREFILL_KV_DIGEST": "true", "HEADRACE_DECODE_KV_DIGEST": "true"}
    with deployed(*flags, environment=environment) as running:
        running.wait_for_all_workers()
        assert [ask(running, number) for number in range(REQUESTS)] == expected
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda number: ask(running, number), range(REQUESTS)))
        running.wait_until_idle()
        computed = digests(running, "prefill-0", "kv computed")
        arrived = digests(running, "decode-0", "kv verified")
        workers = running.workers().values()
        free = [worker["pages_free"] for worker in workers]
        total = [worker["pages_total"] for worker in workers]
        wire = running.metric("prefill-0", "headrace_kv_sent_bytes_total", kind="wire")
        sent = [
            running.metric("prefill-0", "headrace_kv_sent_tokens_total"),
            running.metric("decode-0", "headrace_kv_transfer_tokens_total"),
        ]
        decode: Any = running.workers()["decode-0"]["pages_total"]
        pages = {
            group: running.metric("decode-0", "headrace_kv_pages", group=group) for group in decode
        }
    assert all(len(tokens) == 40 for tokens in together)
    assert len(arrived) == 2 * REQUESTS
    assert arrived == computed
    assert free == total
    assert wire > 0
    assert sent == [2 * sum(40 + 97 * number for number in range(REQUESTS))] * 2
    assert pages == decode
    one_group = name in ("dense", "lowrank")
    assert list(pages) == (["kv"] if one_group else ["full_precision", "compressed"])
