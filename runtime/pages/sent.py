"""Which tokens and pages of a sequence one worker sends to another."""

from dataclasses import dataclass, replace
from typing import Self

from runtime.pages.eviction import evicted_tokens
from runtime.pages.plan import PageCount, PagePlan


@dataclass(frozen=True)
class SentTokens:
    """Tokens of a request that a worker has computed, and whose KV it sends.

    Both workers derive them from the request, its first token to send, and the plan.

    Attributes:
        plan: page groups of both workers.
        known: number of tokens of the request.
        computed: number of ``known`` tokens that the prefill worker computes. The decode worker
            computes the others.
        evicted: number of computed tokens whose KV the prefill worker evicts and does not send.
        first: position of the first token whose KV is sent, a multiple of the page size. The decode
            worker has the KV of earlier tokens.

    Raises:
        ValueError: ``first`` is out of bounds, is not at a page boundary, or is not 0 although
            tokens are evicted (eviction moves tokens between pages).
    """

    plan: PagePlan
    known: int
    computed: int
    evicted: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        if not self.first:
            return
        if self.evicted or self.first % self.plan.page_size or not 0 < self.first <= self.kept:
            raise ValueError(
                f"KV cannot be sent from token {self.first} of {self.kept} tokens in pages of "
                f"{self.plan.page_size}, of which {self.evicted} were evicted"
            )

    @classmethod
    def of(
        cls,
        plan: PagePlan,
        *,
        known: int,
        prompt_tokens: int,
        kv_eviction: float,
        first: int = 0,
    ) -> Self:
        """Return which tokens of a request are computed and sent.

        Args:
            known: number of its tokens, including those of the output of an earlier attempt.
            kv_eviction: fraction of the prompt tokens to evict.
            first: see `SentTokens`, which also describes the errors.
        """
        evicted = evicted_tokens(prompt_tokens, kv_eviction, plan.page_size)
        computed = plan.prefilled(known, prompt_tokens, evicted)
        return cls(plan, known, computed, evicted, first)

    @classmethod
    def whole(cls, plan: PagePlan, tokens: int) -> Self:
        """Return the value for a prompt whose tokens are all computed and sent."""
        return cls(plan, tokens, tokens)

    @classmethod
    def cached(cls, plan: PagePlan, known: int, first: int = 0) -> Self:
        """Return the value for a request whose KV is cached on the worker that sends it.

        It sends the full pages before the last token, and computes nothing.

        Args:
            known: number of tokens of the request.
            first: see `SentTokens`, which also describes the errors.
        """
        return cls(plan, known, plan.full(max(known - 1, 0)) * plan.page_size, first=first)

    @property
    def samples_first(self) -> bool:
        """Whether the prefill worker samples first tokens, because it computes all known tokens."""
        return self.computed == self.known

    @property
    def kept(self) -> int:
        """Number of tokens in the pages of the sequence, those before ``first`` included."""
        return self.computed - self.evicted

    @property
    def held(self) -> PageCount:
        """Number of pages of each group that are not sent, because the decode worker has them."""
        whole = replace(self, first=0)
        groups = range(len(self.plan.groups))
        return PageCount(
            *(
                sum(map(len, whole.pages(group))) - sum(map(len, self.pages(group)))
                for group in groups
            )
        )

    def pages(self, group: int) -> tuple[range, ...]:
        """Return the pages of a group that are sent, as indices within the sequence."""
        first = self.plan.full(self.first)
        return tuple(
            range(max(pages.start, first), max(pages.stop, first))
            for pages in self.plan.sent(self.kept, group)
        )
