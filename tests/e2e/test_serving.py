"""Basic use of the HTTP and gRPC APIs, with real processes and a real model."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import psutil
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.v1 import inference_pb2 as pb
from tests.harness.deployment import Running, deployed

openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Without the second sentence the first token is a near-tie, which bf16 on a GPU can flip.
QUESTION = "What is the capital of France? Answer with one word."


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    environment = {"PYTHONPROFILEIMPORTTIME": "1"}  # the logs list the imported modules
    # The codec auto might choose raw.
    with deployed("--codec", "splitzip", environment=environment) as deployment:
        yield deployment


def test_openai_client_streams_the_right_answer(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    stream = client.chat.completions.create(
        model=running.model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "Paris" in "".join(pieces)
    assert usage is not None
    assert usage.completion_tokens > 0


def test_tool_call_is_the_same_whole_and_streamed(running: Running) -> None:
    """The small model calls the tool because it did so in the turns before."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": city}
    messages: list[dict[str, Any]] = []
    for name in ("Rome", "Oslo", "Lima", "Paris"):
        called = {"name": "get_weather", "arguments": json.dumps({"city": name})}
        call = {"id": name, "type": "function", "function": called}
        messages.append({"role": "user", "content": f"How is the weather in {name}?"})
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    arguments: dict[str, Any] = {
        "model": running.model,
        "messages": messages[:-1],
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = client.chat.completions.create(**arguments).choices[0]
    with client.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_tokens_are_streamed_as_they_are_computed(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    stream = client.completions.create(
        model=running.model,
        prompt="Once upon a time",
        max_tokens=64,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert sum(1 for chunk in stream if chunk.choices[0].text) > 1


def test_completion_continues_the_prompt(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    answer = client.completions.create(
        model=running.model, prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text


def test_choices_of_a_prompt_differ_and_same_seed_repeats_them(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")

    def ask() -> list[str]:
        answer = client.completions.create(
            model=running.model,
            prompt="Once upon a time",
            temperature=1,
            seed=5,
            n=3,
            max_tokens=12,
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_logprobs_belong_to_the_sampled_tokens(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused")
    answer = client.chat.completions.create(
        model=running.model,
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs))


def test_grpc_service_is_found_through_reflection(running: Running) -> None:
    """Find the service through reflection, as grpcurl does."""
    channel = grpc.insecure_channel(running.grpc_target)
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.Inference"),
    ]
    listed, described = reflection.ServerReflectionInfo(iter(requests))
    names = {service.name for service in listed.list_services_response.service}
    assert {"headrace.v1.Inference", "grpc.health.v1.Health"} <= names
    pool = descriptor_pool.DescriptorPool()
    files = [
        FileDescriptorProto.FromString(raw)
        for raw in described.file_descriptor_response.file_descriptor_proto
    ]
    for file in sorted(files, key=lambda f: len(f.dependency)):
        pool.Add(file)
    service = pool.FindServiceByName("headrace.v1.Inference")
    assert {"Generate", "ListModels"} <= {method.name for method in service.methods}


def test_grpc_generate_and_health(running: Running) -> None:
    stub = running.stub()
    request = pb.GenerateRequest(text="The capital of France is", max_tokens=8, temperature=0)
    responses = list(stub.Generate(request))
    assert "Paris" in "".join(response.text for response in responses)
    assert responses[-1].usage.completion_tokens == 8
    health = health_pb2_grpc.HealthStub(grpc.insecure_channel(running.grpc_target))
    status = health.Check(health_pb2.HealthCheckRequest(service="headrace.v1.Inference")).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_kv_is_sent_compressed(running: Running) -> None:
    """KV of this model is compressed by a factor of at least 1.28."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 30
    httpx.post(
        f"{running.url}/v1/completions",
        json={"model": running.model, "prompt": prompt, "max_tokens": 2},
        timeout=60,
        trust_env=False,
    ).raise_for_status()
    running.wait_until_idle()
    ratio = running.metric("prefill-0", "headrace_kv_compress_ratio")
    assert ratio >= 1.28
    assert running.metric("prefill-0", "headrace_kv_lease_active") == 0


def test_worker_of_the_default_model_needs_at_most_1300_mb(running: Running) -> None:
    """After prompts of several lengths, each of which takes memory the first time.

    The first deployment compiles the loops, whose intermediate code takes 130 MB more.
    """
    _send_prompts(running)
    with deployed("--codec", "splitzip") as second:
        _send_prompts(second)
        for name in ("prefill-0", "decode-0"):
            resident = psutil.Process(second.state.pids[name]).memory_info().rss
            assert resident < 1.3e9, f"{name}: {resident / 1e6:.0f} MB"


def _send_prompts(running: Running) -> None:
    for words in (40, 60, 90, 150, 210, 300):
        body = {"model": running.model, "prompt": "one " * words, "max_tokens": 2}
        url = f"{running.url}/v1/completions"
        httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()


def test_no_process_listens_outside_the_loopback_host(running: Running) -> None:
    """KV is transferred through shared memory; `test_listening_addresses` tests TCP."""
    body = {"model": running.model, "prompt": "The quick brown fox. " * 20, "max_tokens": 2}
    url = f"{running.url}/v1/completions"
    httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
    assert running.metric("decode-0", "headrace_kv_transfer_bytes_total", kind="wire") > 0
    running.check_listeners()


def test_without_an_otlp_endpoint_no_process_imports_opentelemetry(running: Running) -> None:
    """FastAPI imports the API, but not the SDK and the exporters."""
    for process in running.state.pids:
        lines = (running.logs / f"{process}.log").read_text().splitlines()
        imported = {line.rpartition("|")[2].strip() for line in lines if "import time:" in line}
        assert "structlog" in imported
        sdk = ("opentelemetry.sdk", "opentelemetry.exporter", "services.common.otlp")
        unwanted = sdk if process == "gateway" else (*sdk, "opentelemetry")
        assert not {name for name in imported if name.startswith(unwanted)}
