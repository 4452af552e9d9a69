"""Prompts in groups with a common system prompt: the ``shared_prefix`` data of inference-perf.

llm-d's benchmarks of prefix-aware routing use it. Its source is
`kubernetes-sigs/inference-perf <https://github.com/kubernetes-sigs/inference-perf>`_.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.workload.base import RequestSpec
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.prefix import salts, words_of
from loadgen.workload.prompts import PromptWriter, draft_of, in_blocks
from loadgen.workload.rows import Row, read_settings

_ALIASES = {
    "num_unique_system_prompts": "num_groups",
    "num_users_per_system_prompt": "num_prompts_per_group",
}
"""Other names of settings in newer versions of inference-perf."""
_SETTINGS = (
    *("num_groups", "num_prompts_per_group"),
    *("system_prompt_len", "question_len", "output_len"),
)


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """A set of prompts, each a system prompt of its group and a question of its own.

    Attributes:
        groups: number of system prompts.
        prompts: prompts of each group.
        system_tokens, question_tokens, output_tokens: lengths of the parts, and of the answers.
        cold: whether the first words of each request are unique, so that no prefix cache holds any
            part of it. Lengths do not change.
        variant: runs of one seed with different variants differ in the questions.
    """

    groups: int
    prompts: int
    system_tokens: int
    question_tokens: int
    output_tokens: int
    writer: PromptWriter
    cold: bool = False
    variant: int = 0

    @classmethod
    def read(
        cls, path: Path, writer: PromptWriter, *, cold: bool = False, variant: int = 0
    ) -> "PrefixGroups":
        """Read a configuration of inference-perf, in YAML or JSON.

        The settings are those in ``data.shared_prefix``, or the top level of the file.

        Raises:
            UsageError: if the file cannot be read, a setting is missing or out of range, or is not
                supported.
        """
        row = _settings(read_settings(path))
        groups, prompts, system, question, output = (
            row.integer(key, minimum=1) for key in _SETTINGS
        )
        if (most := max(system, question, output)) > MAX_TOKENS:
            raise row.error(f"{most} is more than {MAX_TOKENS} tokens")
        return cls(groups, prompts, system, question, output, writer, cold, variant)

    def requests(self, seed: int) -> Iterator[RequestSpec]:
        """Yield all prompts in random order, endlessly: each round repeats them in another order.

        ``seed`` must not be negative.
        """
        systems, order, questions = np.random.SeedSequence(seed).spawn(3)
        draw, generator = self.writer.vocabulary.draw, np.random.default_rng(systems)
        prefixes = [draw(generator, self.system_tokens) for _ in range(self.groups)]
        generator = words_of(questions, self.variant)
        asked = [draw(generator, self.question_tokens) for _ in range(self.groups * self.prompts)]
        shuffled, unique = np.random.default_rng(order), salts() if self.cold else None
        while True:
            for block in in_blocks(shuffled.permutation(len(asked)).tolist()):
                drafts = [
                    draft_of(self.writer, (prefixes[which % self.groups], asked[which]), unique)
                    for which in block
                ]
                for written in self.writer.write(drafts):
                    yield RequestSpec(written.prompt, written.tokens, self.output_tokens)


def _settings(row: Row) -> Row:
    """Return the settings of the shared prefixes, by their names in `_SETTINGS`."""
    values: Any = row.values
    if isinstance(data := values.get("data"), dict):
        values = data.get("shared_prefix")
        if not isinstance(values, dict):
            raise row.error("data.shared_prefix is not an object")
    named = {_ALIASES.get(key, key): value for key, value in values.items()}
    if named.pop("enable_multi_turn_chat", False):
        raise row.error(
            "enable_multi_turn_chat is not supported: give the lengths as options, with --turns"
        )
    unknown = [key for key, value in named.items() if key not in _SETTINGS and value is not None]
    if unknown:
        raise row.error(f"not supported: {', '.join(unknown)}; expected {', '.join(_SETTINGS)}")
    return Row(row.where, named)
