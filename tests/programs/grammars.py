"""Cost of constrained output: compilation and masks, and steps of SmolLM2-135M on the CPU.

``python -m tests.programs.grammars`` compiles random JSON schemas for the tokenizer of SmolLM2 and
generates random allowed tokens. ``--steps N`` also generates N tokens of one batch of lists with
the model, whose items follow the schemas, with and without the constraint. All times are processor
times.

``--answers`` instead lets the model answer a chat for each schema, with `ANSWER_TOKENS` tokens at
most and temperature 1, the default of the API. The prompt has the names of the fields, but not
their schemas. It prints how many answers finish, and how many of these do not validate.

`tests.runtime.grammar.schemas.random_schema` generates the schemas: objects, arrays, `anyOf`, enums
and constants, nested up to three levels; references to definitions, and in one schema of five a
list that refers to itself; strings with a maximum length, a format or a pattern, of which some are
unbounded; additional properties of any type, of one type or none; names and values with unicode.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from runtime.checkpoint import load_checkpoint
from runtime.core.limits import Limits
from runtime.core.options import EngineOptions
from runtime.core.request import FinishReason, Request, SamplingParams
from runtime.engine import Add, Engine, LocalExecutor
from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.masks import MaskWriter, allowed_tokens
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec, InvalidGrammar
from runtime.grammar.vocabulary import GrammarVocabulary
from runtime.models.build import build_model
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer
from tests.runtime.grammar.schemas import random_schema
from tests.runtime.grammar.validation import faults

console = Console()

RANDOM_TOKENS = 150
ANSWER_TOKENS = 400
_PROGRESS = 50
"""Number of answers after which the result so far is printed."""
_MIN_ITEMS = 100
"""Length of lists that do not end within the tokens of ``--steps``."""
_CLOSING = (b'"', b"}", b"]")

_Pair = tuple[dict[str, Any], Grammar]
"""A schema, and its grammar."""


def main(
    schemas: Annotated[int, typer.Option(help="number of random schemas")] = 200,
    steps: Annotated[int, typer.Option(help="tokens to generate with the model")] = 0,
    batch: Annotated[int, typer.Option(help="requests in the batch of the model")] = 16,
    answers: Annotated[bool, typer.Option(help="answer with the model instead")] = False,
    unfinished: Annotated[bool, typer.Option(help="print answers that do not end")] = False,
    model: Annotated[str, typer.Option(help="name or path of the model")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="device of the answers")] = "cpu",
) -> None:
    """Print the measurements."""
    path = resolve_model(model)
    tokenizer = load_tokenizer(path)
    begin = time.process_time()
    vocabulary = GrammarVocabulary(tokenizer.json, tokenizer.vocab_size, tokenizer.eos_ids)
    console.print(f"vocabulary of {vocabulary.size}: {time.process_time() - begin:.2f} s")
    random = Random(41)
    written = [random_schema(random) for _ in range(schemas)]
    grammars = _compiled(written, vocabulary)
    accepted = [(s, g) for s, g in zip(written, grammars, strict=True) if g]
    if answers:
        _answer(path, tokenizer, accepted, batch, device, unfinished=unfinished)
        return
    _generate_at_random(accepted, tokenizer, random)
    if steps:
        lists = [_long_list_of(schema) for schema, _ in accepted[:batch]]
        constraints = [each for each in _compiled(lists, vocabulary) if each]
        _generate_with_model(path, tokenizer, constraints, steps)


def _long_list_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of lists whose items follow another one, and which do not end soon."""
    items = {key: value for key, value in schema.items() if key != "$defs"}
    definitions = schema.get("$defs", {})
    return {"type": "array", "items": items, "minItems": _MIN_ITEMS, "$defs": definitions}


def _compiled(
    schemas: Sequence[dict[str, Any]], vocabulary: GrammarVocabulary
) -> list[Grammar | None]:
    found: list[Grammar | None] = []
    times = []
    for schema in schemas:
        begin = time.process_time()
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        try:
            found.append(compile_grammar(spec, vocabulary, GrammarBounds()))
        except InvalidGrammar as error:
            console.print(f"refused: {error}")
            found.append(None)
        times.append(time.process_time() - begin)
    accepted = sum(grammar is not None for grammar in found)
    console.print(f"accepted {accepted} of {len(found)}; compilation {_quantiles(times, 1e3)} ms")
    return found


def _generate_at_random(pairs: Sequence[_Pair], tokenizer: Tokenizer, random: Random) -> None:
    """Generate allowed tokens; half of the time one with which answers end, if it is allowed."""
    closing = [id for id, piece in enumerate(tokenizer.pieces) if piece in _CLOSING]
    preferred = [*tokenizer.eos_ids, *closing]
    writer, times, finished, invalid = MaskWriter(1), list[float](), 0, 0
    for schema, grammar in pairs:
        matcher, output = grammar.start(), list[int]()
        while len(output) < RANDOM_TOKENS:
            begin = time.process_time()
            (mask,) = writer.write([matcher], grammar.vocabulary.mask_words)
            times.append(time.process_time() - begin)
            allowed = allowed_tokens(mask, 0, grammar.vocabulary.size)
            wanted = [token for token in preferred if allowed[token]]
            if not wanted or random.random() < 0.5:
                wanted = np.flatnonzero(allowed).tolist()
            token = random.choice(wanted)
            if token in tokenizer.eos_ids:
                finished += 1
                invalid += bool(faults(json.loads(tokenizer.decode(output)), schema))
                break
            matcher.advance([token])
            output.append(token)
    mean = 1e6 * sum(times) / len(times)
    console.print(
        f"mask of one sequence {_quantiles(times, 1e6)} µs, mean {mean:.0f}; {len(times)} masks"
    )
    console.print(f"finished {finished}, of which invalid {invalid}")


def _generate_with_model(
    path: Path, tokenizer: Tokenizer, constraints: Sequence[Grammar], steps: int
) -> None:
    model = build_model(load_checkpoint(path, torch.float32))
    text = tokenizer.render_chat([{"role": "user", "content": "Write a long list of objects."}])
    prompt = tuple(tokenizer.encode_rendered(text))
    requests, ends = [], frozenset(tokenizer.eos_ids)
    for number, grammar in enumerate(constraints):
        sampling = SamplingParams(temperature=0.7, seed=number, constrained=True)
        state = grammar.start()
        requests.append(
            Request(str(number), prompt, len(prompt), sampling, steps, ends, grammar=state)
        )
    free = [
        replace(
            request,
            sampling=replace(request.sampling, constrained=False),
            stop_token_ids=frozenset[int](),
            grammar=None,
        )
        for request in requests
    ]
    pages = model.layout.plan.each(len(requests) * (len(prompt) + steps) // 16 + 64)
    limits = Limits(max_running=len(requests), max_waiting=len(requests), step_tokens=512)
    engines = [Engine(LocalExecutor(model, EngineOptions(pages, limits))) for _ in range(2)]
    times = _in_turn(engines, (free, requests))
    for title, each in zip(("without", "with"), times, strict=True):
        console.print(
            f"step of {len(free)} sequences {title} constraints: {_quantiles(each, 1e3)} ms"
        )
    relative = np.median(times[1]) / np.median(times[0]) - 1
    console.print(f"median with constraints {relative:+.1%}")


def _answer(
    path: Path,
    tokenizer: Tokenizer,
    pairs: Sequence[_Pair],
    batch: int,
    device: str,
    *,
    unfinished: bool,
) -> None:
    """Let the model answer a chat for each schema."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = build_model(load_checkpoint(path, torch.float32), device=device, dtype=dtype)
    commands = []
    for number, (schema, grammar) in enumerate(pairs):
        fields = ", ".join(schema["properties"])
        content = f"Write a JSON object with the fields {fields}."
        text = tokenizer.render_chat([{"role": "user", "content": content}])
        tokens = tuple(tokenizer.encode_rendered(text))
        sampling = SamplingParams(temperature=1.0, seed=number, constrained=True)
        ends = frozenset(tokenizer.eos_ids)
        request = Request(
            str(number), tokens, len(tokens), sampling, ANSWER_TOKENS, ends, grammar=grammar.start()
        )
        commands.append(Add(request))
    pages = model.layout.plan.each(batch * (ANSWER_TOKENS + 200) // 16 + 64)
    limits = Limits(max_running=batch, max_waiting=len(pairs), step_tokens=512)
    engine = Engine(LocalExecutor(model, EngineOptions(pages, limits)))
    outputs: dict[str, list[int]] = {command.request.id: [] for command in commands}
    reasons: dict[str, FinishReason] = {}
    done = 0
    while commands or engine.has_work:
        output = engine.step(commands)
        commands = []
        for name, token in output.tokens:
            outputs[name].append(token.token)
        reasons |= {name: reason for name, _, reason in output.finished}
        before = done
        while done < len(pairs) and str(done) in reasons:
            done += 1
        if done // _PROGRESS > before // _PROGRESS or done == len(pairs):
            _print_finished(tokenizer, pairs[:done], outputs, reasons)
    for number, (schema, _) in enumerate(pairs):
        if unfinished and reasons[str(number)] is FinishReason.LENGTH:
            text = tokenizer.decode(outputs[str(number)])
            console.print(f"{json.dumps(schema, ensure_ascii=False)}\n  {text!r}", markup=False)


def _print_finished(
    tokenizer: Tokenizer,
    pairs: Sequence[_Pair],
    outputs: Mapping[str, Sequence[int]],
    reasons: Mapping[str, FinishReason],
) -> None:
    finished = [at for at in range(len(pairs)) if reasons[str(at)] is FinishReason.STOP]
    invalid = [
        at
        for at in finished
        if faults(json.loads(tokenizer.decode(outputs[str(at)])), pairs[at][0])
    ]
    console.print(
        f"finished {len(finished)} of {len(pairs)} answers, of which invalid {len(invalid)}"
    )


def _in_turn(
    engines: Sequence[Engine], batches: Sequence[Sequence[Request]]
) -> tuple[list[float], ...]:
    """Step engines in turn; return for each the times of steps in which all requests decode."""
    times = tuple(list[float]() for _ in engines)
    waiting = [[Add(request) for request in batch] for batch in batches]
    while any(waiting) or any(engine.has_work for engine in engines):
        for number, engine in enumerate(engines):
            if not waiting[number] and not engine.has_work:
                continue
            begin = time.process_time()
            output = engine.step(waiting[number])
            waiting[number] = []
            if len(output.tokens) == len(batches[number]):
                times[number].append(time.process_time() - begin)
    assert all(len(each) > 1 for each in times), "no step in which all requests decode"
    return tuple(each[1:] for each in times)


def _quantiles(values: Sequence[float], scale: float) -> str:
    """Return median, 99th percentile and maximum as text."""
    found = np.quantile(values, (0.5, 0.99, 1.0)) * scale if len(values) else np.zeros(3)
    return " / ".join(f"{value:.3g}" for value in found)


if __name__ == "__main__":
    typer.run(main)
