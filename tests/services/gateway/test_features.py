"""The table of features in ``FEATURES.md``: each pair is sent to a gateway."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.v1 import request_pb2
from services.common.token_ids import unpack_tokens
from services.worker.wire import request_from_message
from tests.services.gateway.chat_models import END, assembled, family_model
from tests.services.gateway.conftest import Site, gateway_site
from tests.services.gateway.fakes import FakeStream
from tests.services.gateway.field_tables import table_rows
from tests.services.gateway.test_prompt_logprobs import send_scores

COMBINES, REFUSED, IGNORED = "✓", "✗", "○"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "The"},
        ],
        "max_tokens": 300,
    },
    COMPLETIONS: {"prompt": "The weather is", "max_tokens": 300},
}
THOUGHT, ANSWER = "<think>Well…</think>", '"sunny q9"'
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Zürich q9"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"name": "a", "schema": {"enum": ["sunny q9"]}}
BYTES = list(range(256))
"""Token ids of all bytes; the other tokens are special."""


@dataclass(frozen=True)
class Outcome:
    """Result of a request that was accepted.

    Attributes:
        request: what the worker has received.
        prompt: text of its prompt.
        end: the end-of-sequence token.
        priority: priority of the placement.
        streamed: whether the response was a stream.
        answer: body of the response; the choices of a stream are assembled.
    """

    request: request_pb2.Request
    prompt: str
    end: int
    priority: int
    streamed: bool
    answer: Mapping[str, Any]

    @property
    def choices(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.answer["choices"]
        return found

    @property
    def text(self) -> str:
        """Content, reasoning and arguments of the first choice."""
        choice = self.choices[0]
        return json.dumps(choice.get("text", choice.get("message")), ensure_ascii=False)

    @property
    def scores(self) -> Any:
        """Log probabilities of the prompt."""
        return self.answer.get("prompt_logprobs") or self.choices[0].get("prompt_logprobs")


@dataclass(frozen=True)
class Feature:
    """A feature of requests.

    Attributes:
        name: name in the document.
        fields: fields of the request.
        shows: whether the outcome of a request shows the effect of the fields.
        paths: paths that have the feature; the others refuse it.
        in_chats: fields of chats, if they differ.
    """

    name: str
    fields: Mapping[str, Any]
    shows: Callable[[Outcome], bool]
    paths: tuple[str, ...] = (CHATS, COMPLETIONS)
    in_chats: Mapping[str, Any] | None = None

    def at(self, path: str) -> Mapping[str, Any]:
        """Return the fields for a path."""
        return self.fields if path == COMPLETIONS or self.in_chats is None else self.in_chats


def _has_call(outcome: Outcome) -> bool:
    return all(choice["message"].get("tool_calls") for choice in outcome.choices)


def _has_logprobs(outcome: Outcome) -> bool:
    lists = [choice["logprobs"] or {} for choice in outcome.choices]
    return all(found.get("content") or found.get("token_logprobs") for found in lists)


def _is_stopped(outcome: Outcome) -> bool:
    return outcome.choices[0]["finish_reason"] == "stop" and "q9" not in outcome.text


FEATURES = (
    Feature("`stream`", {"stream": True}, lambda o: o.streamed),
    Feature("`n` > 1", {"n": 2}, lambda o: len(o.choices) == o.request.choices == 2),
    Feature("`logprobs`", {"logprobs": 1}, _has_logprobs, in_chats={"logprobs": True}),
    Feature(
        "`prompt_logprobs`",
        {"prompt_logprobs": 1},
        lambda o: o.scores is not None and len(o.scores) == o.request.prompt_tokens,
    ),
    Feature(
        "`echo`",
        {"echo": True},
        lambda o: all(choice["text"].startswith(o.prompt) for choice in o.choices),
        paths=(COMPLETIONS,),
    ),
    Feature("`tools`", {"tools": [TOOL]}, _has_call, paths=(CHATS,)),
    Feature(
        "`tool_choice`: required",
        {"tools": [TOOL], "tool_choice": "required"},
        lambda o: _has_call(o) and "start:" in o.request.structured_outputs.grammar,
        paths=(CHATS,),
    ),
    Feature(
        "`reasoning_effort`",
        {"reasoning_effort": "high"},
        lambda o: all("Well" in c["message"].get("reasoning", "") for c in o.choices),
        paths=(CHATS,),
    ),
    Feature(
        "`continue_final_message`",
        {"continue_final_message": True},
        lambda o: o.prompt.endswith("The"),
        paths=(CHATS,),
    ),
    Feature(
        "`response_format`",
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        lambda o: "sunny" in o.request.structured_outputs.json,
    ),
    Feature(
        "`structured_outputs`, `guided_`",
        {"guided_regex": ANSWER},
        lambda o: o.request.structured_outputs.regex == ANSWER,
    ),
    Feature("`stop`", {"stop": "q9"}, _is_stopped),
    Feature("`stop_token_ids`", {"stop_token_ids": [7]}, lambda o: 7 in o.request.stop_token_ids),
    Feature(
        "`min_tokens`",
        {"min_tokens": 3},
        lambda o: o.request.sampling.min_tokens == 3,
    ),
    Feature("`ignore_eos`", {"ignore_eos": True}, lambda o: o.end not in o.request.stop_token_ids),
    Feature(
        "`bad_words`",
        {"bad_words": ["rain"]},
        lambda o: len(o.request.sampling.bad_words) > 0,
    ),
    Feature(
        "`allowed_token_ids`",
        {"allowed_token_ids": BYTES},
        lambda o: list(o.request.sampling.allowed_token_ids) == BYTES,
    ),
    Feature(
        "`logit_bias`",
        {"logit_bias": {"5": -2}},
        lambda o: dict(o.request.sampling.logit_bias) == {5: -2},
    ),
    Feature("`seed`", {"seed": 7}, lambda o: o.request.sampling.seed == 7),
    Feature(
        "`truncate_prompt_tokens`",
        {"truncate_prompt_tokens": 8},
        lambda o: o.request.prompt_tokens == 8,
    ),
    Feature("`cache_salt`", {"cache_salt": "a"}, lambda o: len(o.request.cache_salt) > 0),
    Feature("`priority`", {"priority": 3}, lambda o: o.priority == 3),
)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with gateway_site(family_model(tmp_path, "smollm3"), 1, None, {}) as opened:
        yield opened


def output_of(body: Mapping[str, Any]) -> str:
    """Return what the model generates."""
    thought = THOUGHT if "reasoning_effort" in body else ""
    return thought + (CALL if "tools" in body else ANSWER) + END


async def outcome_of(site: Site, path: str, fields: Mapping[str, Any]) -> Outcome | httpx.Response:
    """Send a request. Return its outcome, or the response if it is refused."""
    body, ids = {**BODIES[path], **fields}, site.encode(output_of(fields))

    async def script(stream: FakeStream) -> None:
        request = stream.start.request
        request_from_message("a", request).sampling.validate(site.model.tokenizer.vocab_size)
        if request.sampling.HasField("prompt_logprobs"):
            await send_scores(stream, slice(1, None))
        for first, end in pairwise([*range(0, len(ids), 5), len(ids)]):
            for choice in range(request.choices):
                logprobs = [-1.0] * (end - first)
                await stream.tokens(*ids[first:end], choice=choice, logprobs=logprobs)
        for choice in range(request.choices):
            await stream.end(choice=choice)

    site.worker.script = script
    response = await site.http.post(path, json=body)
    if response.status_code != httpx.codes.OK:
        return response
    request = site.worker.streams[-1].start.request
    is_streamed = response.headers["content-type"].startswith("text/event-stream")
    return Outcome(
        request,
        site.model.tokenizer.decode(unpack_tokens(request.tokens), skip_special=False),
        site.encode(END)[0],
        -site.router.places[-1].priority,  # routers place larger values first
        is_streamed,
        _assembled(response.text, path, request.choices) if is_streamed else response.json(),
    )


def _assembled(events: str, path: str, count: int) -> Mapping[str, Any]:
    """Return the answer of a stream in the form of one that is not streamed."""
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line]
    assert lines.pop() == "[DONE]"
    parsed = [json.loads(line) for line in lines]
    if path == CHATS:
        return {"choices": assembled(parsed, count)}
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": {}} for _ in range(count)]
    for part in (part for event in parsed for part in event["choices"]):
        choice = choices[part["index"]]
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"]
        if part["logprobs"]:
            choice["logprobs"] = {
                name: choice["logprobs"].get(name, []) + values
                for name, values in part["logprobs"].items()
            }
    return {"choices": choices}


async def cell_of(site: Site, one: Feature, other: Feature) -> str:
    """Return the cell of a pair of features, which must be that of all paths that have either."""
    cells = set[str]()
    for path in {*one.paths} & {*other.paths} or (CHATS, COMPLETIONS):
        fields = {**one.at(path), **other.at(path)}
        outcome = await outcome_of(site, path, fields)
        if isinstance(outcome, Outcome):
            both = one.shows(outcome) and other.shows(outcome)
            cells.add(COMBINES if both else IGNORED)
        else:
            error = outcome.json()["error"]
            assert outcome.status_code == httpx.codes.BAD_REQUEST, error
            assert error["type"] == "invalid_request_error"
            assert error["param"].partition(".")[0] in fields
            cells.add(REFUSED)
    assert len(cells) == 1, (one.name, other.name, cells)
    return cells.pop()


def test_table_has_all_features() -> None:
    rows = [row.split("|")[1].strip() for row in table_rows("FEATURES.md", "| | 1 |")]
    assert rows == [f"{number} {feature.name}" for number, feature in enumerate(FEATURES, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name.replace("`", ""))
async def test_row_of_the_table(site: Site, feature: Feature) -> None:
    for path in feature.paths:
        alone = await outcome_of(site, path, feature.at(path))
        assert isinstance(alone, Outcome), alone.text
        assert feature.shows(alone)
    at = FEATURES.index(feature)
    found = [await cell_of(site, feature, other) for other in FEATURES[:at]]
    row = table_rows("FEATURES.md", "| | 1 |")[at]
    assert [cell.strip() for cell in row.split("|")[2:-1]][:at] == found
