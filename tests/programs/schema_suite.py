"""Coverage of the official JSON-Schema-Test-Suite by the compiler of grammars.

``python -m tests.programs.schema_suite FOLDER`` reads the suite's checkout in FOLDER. For each
draft it compiles the schema of each group of the required tests. An instance of an accepted schema
is *allowed* if the grammar allows its JSON text, with the tokens of SmolLM2, and the end after it.
The order of properties in a grammar is that of the schema, so that a valid instance also counts
under *in another order* if only another order of its properties is allowed.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from runtime.grammar.compiler import Grammar, compile_grammar
from runtime.grammar.masks import MaskWriter, allowed_tokens
from runtime.grammar.spec import GrammarBounds, GrammarKind, GrammarSpec, InvalidGrammar
from runtime.grammar.vocabulary import GrammarVocabulary
from services.common.model_source import resolve_model
from services.tokenizer.loading import load_tokenizer
from services.tokenizer.tokenizer import Tokenizer

console = Console(soft_wrap=True)

DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
"""Value of ``$schema`` by the suite's folder, for schemas that have none."""
MAX_ORDERS = 200
"""Maximum number of orders of properties that are tried for one instance."""


@dataclass
class Coverage:
    """Result of one draft.

    Attributes:
        accepted: number of schemas that compile.
        refused: number of others by reason.
        valid, invalid: numbers of instances of accepted schemas: "allowed", "in another order" or
            "not allowed".
        wrong: descriptions of valid instances that are not allowed, and invalid ones that are.
    """

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    valid: Counter[str] = field(default_factory=Counter)
    invalid: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Checker:
    """Compiles schemas and checks texts with the tokens of a model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = tokenizer.eos_ids
        self._vocabulary = GrammarVocabulary(
            tokenizer.json, tokenizer.vocab_size, tokenizer.eos_ids
        )
        self._writer = MaskWriter(1)

    def check(self, draft: Path) -> Coverage:
        """Return the coverage of the required tests of a draft."""
        coverage = Coverage()
        for file in sorted(draft.glob("*.json")):
            for group in json.loads(file.read_text()):
                name = f"{file.stem}: {group['description']}"
                self._check_group(group, DIALECTS[draft.name], name, coverage)
        return coverage

    def _check_group(
        self, group: dict[str, Any], dialect: str, name: str, coverage: Coverage
    ) -> None:
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": dialect, **schema}
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        try:
            grammar = compile_grammar(spec, self._vocabulary, GrammarBounds())
        except InvalidGrammar as error:
            coverage.refused[str(error)] += 1
            return
        coverage.accepted += 1
        for test in group["tests"]:
            outcome = self._outcome(grammar, test["data"])
            (coverage.valid if test["valid"] else coverage.invalid)[outcome] += 1
            if test["valid"] == (outcome == "not allowed"):
                kind = "valid" if test["valid"] else "invalid"
                coverage.wrong.append(f"{name}: {test['description']} ({kind}, {outcome})")

    def _outcome(self, grammar: Grammar, value: Any) -> str:
        if self._allows(grammar, value):
            return "allowed"
        others = islice(reordered(value), 1, MAX_ORDERS)
        if any(self._allows(grammar, other) for other in others):
            return "in another order"
        return "not allowed"

    def _allows(self, grammar: Grammar, value: Any) -> bool:
        text = json.dumps(value, ensure_ascii=False)
        try:
            matcher = grammar.start(self._tokenizer.encode(text))
        except InvalidGrammar:
            return False
        (mask,) = self._writer.write([matcher], grammar.vocabulary.mask_words)
        return any(allowed_tokens(mask, end, 1)[0] for end in self._ends)


def reordered(value: Any) -> Iterator[Any]:
    """Yield a JSON value with each order of the properties of its objects, its own order first."""
    if isinstance(value, list):
        yield from map(list, product(*([*islice(reordered(each), MAX_ORDERS)] for each in value)))
    elif isinstance(value, dict):
        for names in permutations(value):
            choices = ([*islice(reordered(value[name]), MAX_ORDERS)] for name in names)
            for values in product(*choices):
                yield dict(zip(names, values, strict=True))
    else:
        yield value


def main(
    folder: Annotated[Path, typer.Argument(help="checkout of the test suite")],
    details: Annotated[bool, typer.Option(help="list reasons and exceptions")] = False,
) -> None:
    """Print the coverage of each draft."""
    checker = Checker(load_tokenizer(resolve_model("smollm2-135m")))
    table = Table(
        "draft", "schemas accepted", "valid allowed", "in another order", "invalid allowed"
    )
    for name in DIALECTS:
        found = checker.check(folder / "tests" / name)
        valid, invalid = found.valid.total(), found.invalid.total()
        table.add_row(
            name,
            f"{found.accepted} of {found.accepted + found.refused.total()}",
            f"{found.valid['allowed']} of {valid}",
            f"{found.valid['in another order']}",
            f"{invalid - found.invalid['not allowed']} of {invalid}",
        )
        if details:
            for reason, count in found.refused.most_common():
                console.print(f"{name}: {count} refused: {reason}", markup=False)
            for line in found.wrong:
                console.print(f"{name}: {line}", markup=False)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
