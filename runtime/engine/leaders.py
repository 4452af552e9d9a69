"""Prompts that wait while another one computes their beginning, whose pages they then share."""

from collections.abc import Sequence

from runtime.core.sequence import Purpose, SequenceGroup
from runtime.engine.pages import SequencePages

_LEAST_SHARED = 64
"""Tokens that a prompt must save to wait for another one with the same beginning."""


class Leaders:
    """Decides which waiting prompts wait for others, their *leaders*.

    Args:
        step_tokens: see `Limits`. Prompts that fit into one step do not wait for each other.
    """

    def __init__(self, pages: SequencePages, step_tokens: int) -> None:
        self._pages = pages
        self._step_tokens = step_tokens

    def should_wait(self, group: SequenceGroup, prefilling: Sequence[SequenceGroup]) -> bool:
        """Return whether a prompt should wait because another one computes its first tokens now.

        Args:
            prefilling: groups whose prompts are computed.
        """
        leader = group.leader
        if leader is not None:
            is_next = leader in prefilling and leader.computed < group.shared
            if is_next or self._pages.is_computing(leader, group.shared):
                return True
        group.leader = self._find(group, prefilling)
        return group.leader is not None

    def _find(
        self, group: SequenceGroup, prefilling: Sequence[SequenceGroup]
    ) -> SequenceGroup | None:
        """Return the group that computes most of the first tokens of a prompt, and set `shared`.

        None if it shares few tokens with the others, or if all of them fit into one step.
        """
        if group.purpose is Purpose.RECEIVE or group.may_reuse == 0 or group.receives:
            return None
        left = sum(other.left for other in prefilling)
        if not left or left + group.left <= self._step_tokens:
            return None
        prefixes = self._pages.prefixes
        common = [prefixes.common_tokens(group, other) for other in prefilling]
        shared = max(common)
        leader = prefilling[common.index(shared)]
        if leader.computed >= shared or shared - prefixes.cached_tokens(group) < _LEAST_SHARED:
            return None
        group.shared = shared
        return leader
