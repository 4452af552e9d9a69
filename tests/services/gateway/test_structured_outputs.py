"""Constraints on output: fields, messages to workers, refusals, and bounds on compilation."""

import asyncio
import json
import os
import time
from random import Random
from typing import Any

import pytest

from headrace.v1 import sampling_pb2
from runtime.grammar.spec import GrammarFault, GrammarKind, GrammarSpec
from services.common.errors import InvalidRequest
from services.gateway.constraints import Constraint
from services.gateway.grammars import GrammarChecker
from services.gateway.http.schemas import ChatBody, CompletionBody, parse_body
from services.gateway.keys import Tenant
from services.gateway.metrics import GatewayMetrics
from services.gateway.served import ServedModel
from services.gateway.settings import GatewaySettings
from tests.runtime.grammar.schemas import EXPLODING, hostile_schemas, random_schema
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import say

MUTATED = int(os.environ.get("MUTATED_SCHEMAS", "150"))
CHAT = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer"}}, "required": ["ü"]}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))


def constraint(fields: dict[str, Any]) -> Constraint | None:
    content = json.dumps({"messages": CHAT, **fields}).encode()
    body = parse_body(content, ChatBody, max_depth=64, context_length=None)
    return body.options().constraint


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA},
                }
            },
            GrammarKind.JSON_SCHEMA,
            TEXT,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object"}},
            GrammarKind.JSON_SCHEMA,
            '{"type":"object"}',
            "response_format",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            GrammarKind.JSON_SCHEMA,
            TEXT,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": TEXT}},
            GrammarKind.JSON_SCHEMA,
            TEXT,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            GrammarKind.REGEX,
            "a+",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["ä", "b"], "regex": None}},
            GrammarKind.CHOICE,
            '["ä", "b"]',
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"', "json_object": False}},
            GrammarKind.GRAMMAR,
            'start: "a"',
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            GrammarKind.JSON_SCHEMA,
            '{"type":"object"}',
            "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, TEXT, "guided_json"),
        ({"guided_regex": "a"}, GrammarKind.REGEX, "a", "guided_regex"),
        ({"guided_choice": ["a"]}, GrammarKind.CHOICE, '["a"]', "guided_choice"),
        (
            {"guided_grammar": "root ::= [a-z]"},
            GrammarKind.GRAMMAR,
            "root ::= [a-z]",
            "guided_grammar",
        ),
    ],
)
def test_fields_of_constraints(
    fields: dict[str, Any], kind: GrammarKind, text: str, field: str
) -> None:
    assert constraint(fields) == Constraint(GrammarSpec(kind, text), field)
    completion = parse_body(
        json.dumps({"prompt": "a", **fields}).encode(),
        CompletionBody,
        max_depth=64,
        context_length=None,
    )
    assert completion.options().constraint == Constraint(GrammarSpec(kind, text), field)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}]
)
def test_any_text_is_allowed_without_a_constraint(fields: dict[str, Any]) -> None:
    assert constraint(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
            "guided_choice",
        ),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_malformed_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        constraint(fields)
    assert refusal.value.param == param


async def test_worker_gets_the_constraint(site: Site) -> None:
    site.worker.script = say(*site.encode('{"a":1}'))
    body = {"messages": CHAT, "max_tokens": 9, "response_format": {"type": "json_object"}}
    assert (await site.http.post("/v1/chat/completions", json=body)).status_code == 200
    found = site.worker.streams[-1].start.request.structured_outputs
    assert found == sampling_pb2.StructuredOutputs(json='{"type":"object"}')
    body = {"prompt": "a", "max_tokens": 9, "guided_choice": ["a", "b"]}
    assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    assert [*site.worker.streams[-1].start.request.structured_outputs.choice.texts] == ["a", "b"]
    body = {"prompt": "a", "max_tokens": 9}
    assert (await site.http.post("/v1/completions", json=body)).status_code == 200
    assert not site.worker.streams[-1].start.request.HasField("structured_outputs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"enum": []}}, "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)"}}, "guided_json"),
        ({"guided_json": "[" * 30_000}, "guided_json"),
        ({"guided_json": {"$ref": "https://localhost/x"}}, "guided_json"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_invalid_constraint_gets_a_400_that_names_the_field(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    started = len(site.worker.streams)
    response = await site.http.post("/v1/completions", json={"prompt": "a", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(site.worker.streams) == started


async def test_metrics_count_constraints(open_site: OpenSite) -> None:
    site: Site = await open_site(max_grammar_bytes=20_000, max_grammar_depth=20)
    site.worker.script = say(5)
    deep = "(" * 21 + ")" * 21
    schemas: list[Any] = [{"not": {}}, hostile_schemas()["product of anyOf"], SCHEMA]
    given: list[dict[str, Any]] = [
        *({"guided_regex": text} for text in ("a", "b", "a", "(", "(", "a" * 20_001, deep)),
        *({"guided_json": schema} for schema in schemas),
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
        {},
    ]
    for fields in given:
        await site.http.post("/v1/completions", json={"prompt": "a", **fields})
    compiled = {kind.value: 1.0 for kind in GrammarKind} | {"regex": 2.0}
    for kind, count in compiled.items():
        assert site.metric("headrace_grammars_compiled_total", kind=kind) == count
    refused = {"too_large": 1, "too_deep": 1, "too_complex": 1, "unsupported": 1, "invalid": 2}
    for fault in GrammarFault:
        count = refused.get(fault.value, 0)
        assert site.metric("headrace_grammars_refused_total", reason=fault.value) == count
    assert site.metric("headrace_grammar_cache_hits_total") == 2, "a regex, and an invalid one"
    ended = sum(compiled.values()) + 3  # too complex, unsupported, invalid
    assert site.metric("headrace_grammar_compile_seconds_count") == ended


def mutated(value: Any, random: Random) -> Any:
    """Return a copy of a schema with some parts replaced, dropped or moved."""
    if random.random() < 0.06:
        return random.choice([None, -1, 1e308, "", "#", [], {}, True, {"$ref": "#"}, "object"])
    if isinstance(value, list):
        return [mutated(each, random) for each in value if random.random() < 0.97]
    if not isinstance(value, dict):
        return value
    names = list(value)
    return {
        (random.choice(names) if random.random() < 0.05 else name): mutated(each, random)
        for name, each in value.items()
    }


@pytest.mark.slow
async def test_mutated_schemas_are_accepted_or_refused(model: ServedModel) -> None:
    metrics = GatewayMetrics()
    checker = GrammarChecker(GatewaySettings.model_validate({}), model.tokenizer, metrics.grammars)
    random, refusals = Random(5), list[str]()
    try:
        for _ in range(MUTATED):
            text = json.dumps(mutated(random_schema(random), random))
            given = Constraint(GrammarSpec(GrammarKind.JSON_SCHEMA, text), "guided_json")
            try:
                await checker.check(given, Tenant("a"))
            except InvalidRequest as error:
                refusals.append(error.message)
    finally:
        await checker.close()
    assert 0 < len(refusals) < MUTATED
    assert not [message for message in refusals if "too complex" in message], "a process ended"


@pytest.mark.slow
async def test_exploding_schema_is_refused_while_others_are_served(model: ServedModel) -> None:
    """Its process is ended at the time limit, and does not delay the constraints of others."""
    settings = GatewaySettings.model_validate({"grammar_timeout_s": 3.0})
    metrics = GatewayMetrics()
    checker = GrammarChecker(settings, model.tokenizer, metrics.grammars)
    fine = Constraint(GrammarSpec(GrammarKind.REGEX, "a+"), "guided_regex")
    bad = Constraint(GrammarSpec(GrammarKind.JSON_SCHEMA, EXPLODING), "guided_json")
    try:
        await checker.check(fine, Tenant("a"))
        gaps, last = [0.0], time.monotonic()
        exploding = asyncio.create_task(checker.check(bad, Tenant("a")))
        while not exploding.done():
            await asyncio.sleep(0.002)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            if len(gaps) % 100 == 2:
                other = Constraint(GrammarSpec(GrammarKind.REGEX, f"a{{{len(gaps)}}}"), "r")
                await asyncio.wait_for(checker.check(other, Tenant("b")), 30)
                last = time.monotonic()
        with pytest.raises(InvalidRequest, match="takes more than 3 s to compile"):
            exploding.result()
        assert max(gaps) < 1.5, "less than the compilation took"
        begin = time.monotonic()
        with pytest.raises(InvalidRequest, match="takes more than 3 s"):
            await checker.check(bad, Tenant("a"))
        assert time.monotonic() - begin < 1.5, "the result is kept"
        name, labels = "headrace_grammars_refused_total", {"reason": "timeout"}
        assert metrics.registry.get_sample_value(name, labels) == 2
        await checker.check(fine, Tenant("a"))
    finally:
        await checker.close()
