"""Which tokens and pages of a sequence one worker sends to another."""

from dataclasses import dataclass
from typing import Self

from runtime.pages.eviction import evicted_tokens
from runtime.pages.plan import PagePlan


@dataclass(frozen=True)
class SentTokens:
    """Tokens of a request that a prefill worker computes, and whose KV it sends.

    Both workers derive them from the request and the plan, without a message.

    Attributes:
        plan: page groups of both workers.
        known: number of tokens of the request.
        computed: number of them that the prefill worker computes; the decode worker computes the
            others again.
        evicted: number of computed tokens whose KV it evicts. The others are sent.
    """

    plan: PagePlan
    known: int
    computed: int
    evicted: int = 0

    @classmethod
    def of(cls, plan: PagePlan, *, known: int, prompt_tokens: int, kv_eviction: float) -> Self:
        """Return which tokens of a request are computed and sent.

        Args:
            known: number of its tokens, including those of the output of an earlier attempt.
            kv_eviction: fraction of the prompt tokens to evict.
        """
        evicted = evicted_tokens(prompt_tokens, kv_eviction, plan.page_size)
        return cls(plan, known, plan.prefilled(known, prompt_tokens, evicted), evicted)

    @classmethod
    def whole(cls, plan: PagePlan, tokens: int) -> Self:
        """Return all tokens of a prompt."""
        return cls(plan, tokens, tokens)

    @property
    def samples_first(self) -> bool:
        """Whether the prefill worker samples first tokens: it computes all tokens."""
        return self.computed == self.known

    @property
    def kept(self) -> int:
        """Number of tokens in the pages that are sent."""
        return self.computed - self.evicted

    def pages(self, group: int) -> tuple[range, ...]:
        """Return the pages of a group that are sent, as indices within the sequence."""
        return self.plan.sent(self.kept, group)
