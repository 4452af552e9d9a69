"""Benchmarks of other projects: guidellm and aiperf."""

import json
from pathlib import Path

import pytest

from tests.clients.client import output_of, variables_of
from tests.clients.environments import python_of
from tests.harness.deployment import Running

pytestmark = [pytest.mark.clients, pytest.mark.more_clients, pytest.mark.timeout(2400)]

REQUESTS, STREAMS, INPUT, OUTPUT = 6, 2, 20, 8


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_counts_every_request(
    running: Running, tokenizer: Path, tmp_path: Path, path: str
) -> None:
    report = tmp_path / "report.json"
    target = f"target={running.url},model={running.model},request_format={path}"
    lengths = f"prompt_tokens={INPUT},output_tokens={OUTPUT}"
    command = [
        *(str(python_of("guidellm").with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,{target}"),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,{lengths}"),
        *("--output", f"kind=json,path={report}"),
    ]
    output_of(command, variables_of(running), 300)
    benchmark = json.loads(report.read_text())["benchmarks"][0]
    metrics, requests = benchmark["metrics"], benchmark["requests"]
    assert metrics["request_totals"]["successful"] == REQUESTS, {
        kind: requests[kind] for kind in ("errored", "incomplete")
    }
    assert metrics["request_totals"]["errored"] == 0
    assert metrics["output_token_count"]["successful"]["mean"] == OUTPUT


def test_aiperf_counts_every_request(running: Running, tokenizer: Path, tmp_path: Path) -> None:
    command = [
        *(str(python_of("aiperf").with_name("aiperf")), "profile", "--ui", "none"),
        *("--model", running.model, "--url", running.url, "--tokenizer", str(tokenizer)),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", str(STREAMS)),
        *("--request-count", str(REQUESTS), "--isl", str(INPUT), "--osl", str(OUTPUT)),
        *("--output-artifact-dir", str(tmp_path)),
    ]
    variables = variables_of(running)
    del variables["HF_HUB_OFFLINE"]  # with it, aiperf does not read tokenizers from folders
    output_of(command, variables, 300)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report["error_summary"]
