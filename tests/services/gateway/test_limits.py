"""Limits of requests that the workers register, and that settings can only lower."""

import pytest

from headrace.v1 import error_pb2, inference_pb2, inference_pb2_grpc
from services.common.token_ids import count_tokens
from services.gateway.gateway import Gateway
from services.gateway.keys import ApiKeys
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.failures import completion, failing, outcomes
from tests.services.gateway.fakes import LENGTH, FakeStream, say
from tests.services.gateway.test_tokenizer_fit import model_of

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def listed(site: Site) -> tuple[int | None, int | None, int]:
    """Return the context length in /v1/models, /tokenize and ListModels."""
    models = (await site.http.get("/v1/models")).json()["data"]
    one = (await site.http.get(f"/v1/models/{site.model.name}")).json()
    assert models == [one]
    tokenized = (await site.http.post("/tokenize", json={"prompt": "hi"})).json()
    stub = inference_pb2_grpc.InferenceStub(site.rpc)
    found = await stub.ListModels(inference_pb2.ListModelsRequest())
    return one["max_model_len"], tokenized["max_model_len"], found.models[0].context_length


async def refresh(site: Site) -> None:
    """Ask the router for the limits, as the service does once per second."""
    site.gateway._ready_until = 0.0
    await site.gateway.not_ready()


@pytest.mark.parametrize(
    ("registered", "setting", "expected"),
    [(4096, None, 4096), (131_072, None, 131_072), (4096, 1000, 1000), (4096, 5000, 4096)],
)
async def test_context_length_is_that_of_the_workers(
    open_site: OpenSite, registered: int, setting: int | None, expected: int
) -> None:
    site: Site = await open_site(context_length=setting, max_body_bytes=1 << 24)
    site.worker.script = say(5)
    site.router.context_length = registered
    await refresh(site)
    assert await listed(site) == (expected, expected, expected)
    long = await completion(site, prompt=[1] * expected)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert str(expected) in long.json()["error"]["message"]
    explicit = await completion(site, prompt=[1] * 10, max_tokens=expected - 9)
    assert explicit.json()["error"]["param"] == "max_tokens"
    many = [CHAT["messages"][0]] * (expected + 1)
    for path in ("/v1/chat/completions", "/tokenize"):
        refused = await site.http.post(path, json={"messages": many})
        assert refused.json()["error"]["param"] == "messages"
    assert site.router.places == []
    fits = await completion(site, prompt=[1] * 10, max_tokens=expected - 10)
    assert fits.status_code == 200


@pytest.mark.parametrize("setting", [None, 2048])
async def test_context_length_is_unknown_before_a_router_reports_workers(
    model: ServedModel, open_site: OpenSite, setting: int | None
) -> None:
    settings = GatewaySettings.model_validate({"context_length": setting})
    gateway = Gateway(settings, model, ApiKeys())
    assert gateway.limits.context_length == setting
    await gateway.close()
    site: Site = await open_site(context_length=setting)
    site.worker.script = say(5)
    site.gateway.limits.context_length = gateway.limits.context_length
    assert await listed(site) == (setting, setting, setting or 0)
    answer = await site.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    state = (await site.http.get("/page/state")).json()
    assert state["model"]["context_length"] == (setting or 8192)


async def test_last_known_context_length_stays_while_no_worker_is_registered(site: Site) -> None:
    site.router.context_length = None
    site.router.not_ready = "no decode worker is registered"
    await refresh(site)
    assert await listed(site) == (8192, 8192, 8192)
    site.router.context_length = 4096
    await refresh(site)
    assert (await listed(site))[0] == 4096


async def test_alternatives_of_log_probabilities_are_limited_by_the_workers(
    open_site: OpenSite,
) -> None:
    site: Site = await open_site(max_logprobs=100)
    site.worker.script = say(5)
    site.router.model_info = model_of(site, max_logprobs=20)
    await refresh(site)
    refused = await completion(site, logprobs=21)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    body = {**CHAT, "logprobs": True, "top_logprobs": 21}
    refused = await site.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
    assert site.router.places == []
    assert (await completion(site, logprobs=20)).status_code == 200


async def test_setting_lowers_the_alternatives_of_log_probabilities(open_site: OpenSite) -> None:
    site: Site = await open_site(max_logprobs=5)
    site.router.model_info = model_of(site, max_logprobs=20)
    await refresh(site)
    assert (await completion(site, logprobs=6)).status_code == 400


async def test_request_without_max_tokens_gets_what_fits(site: Site) -> None:
    site.router.outputs = [9, 9]
    site.worker.script = full_length
    chat = await site.http.post("/v1/chat/completions", json=CHAT)
    assert chat.json()["choices"][0]["finish_reason"] == "length"
    assert chat.json()["usage"]["completion_tokens"] == 9
    short = await site.http.post("/v1/completions", json={"prompt": "hi"})
    assert short.json()["usage"]["completion_tokens"] == 9
    prompt = count_tokens(site.worker.streams[0].start.request.tokens)
    asked = [(call.max_tokens, call.required_tokens) for call in site.router.places]
    assert asked == [(8192 - prompt, 1), (16, 1)]


async def test_explicit_max_tokens_must_fit(site: Site) -> None:
    site.router.refusals = [(413, "too_large")]
    assert (await completion(site)).json()["error"]["code"] == "context_length_exceeded"
    assert [(call.max_tokens, call.required_tokens) for call in site.router.places] == [(20, None)]


async def full_length(stream: FakeStream) -> None:
    """Script: generate as many tokens as the request allows."""
    for _ in range(stream.start.request.max_tokens - stream.replayed):
        await stream.tokens(7)
    await stream.end(LENGTH)


async def test_retry_on_a_smaller_worker_counts_delivered_tokens(open_site: OpenSite) -> None:
    """5 tokens were delivered, and 4 more fit on the other worker."""
    site: Site = await open_site(workers=2)
    site.workers[0].script = failing(error_pb2.ERROR_CODE_INTERNAL, 7, 7, 7, 7, 7)
    site.workers[1].script = full_length
    site.router.outputs = [100, 4]
    answer = await site.http.post("/v1/chat/completions", json=CHAT)
    assert answer.json()["usage"]["completion_tokens"] == 9
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    first, second = site.router.places
    assert second.prompt_tokens == first.prompt_tokens + 5
    assert second.max_tokens == first.max_tokens - 5
    starts = [worker.streams[0].start.request.max_tokens for worker in site.workers]
    assert starts == [100, 9]


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, True), ({"min_tokens": 2}, True), ({"min_tokens": 3}, False), ({"max_tokens": 9}, False)],
)
async def test_output_ends_with_length_if_no_other_worker_has_space(
    site: Site, fields: dict[str, int], ends: bool
) -> None:
    """If the client asked for more tokens, it gets an error."""

    async def lose(stream: FakeStream) -> None:
        await stream.tokens(*site.encode("five words"))
        site.router.refusals = [(413, "too_large"), (413, "too_large")]
        await stream.fail(error_pb2.ERROR_CODE_INTERNAL)

    site.worker.script = lose
    answer = await site.http.post("/v1/chat/completions", json={**CHAT, **fields})
    await site.router.settled()
    assert outcomes(site) == [("failed", "decode-0")]
    required = fields.get("min_tokens", 1)
    asked = [call.required_tokens for call in site.router.places]
    if "max_tokens" not in fields:
        assert asked == [required, max(1, required - 2), max(1, required - 2)]
    if not ends:
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "five words"
        assert choice["finish_reason"] == "length"
