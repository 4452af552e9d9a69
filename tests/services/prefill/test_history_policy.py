"""The choice between reading history and computing it."""

import math

import pytest

from services.prefill.history_policy import (
    AVOID_S,
    EXPLORE_EVERY,
    PROBES,
    SWITCH_BELOW,
    HistoryPolicy,
    least_tokens,
)

KIB = 1024
# Llama-3-8B: 128 KiB a token. 50,000 tokens/s take 20 us a token; 20 GiB/s take 6.1 us.
TOKEN_BYTES = 128 * KIB
TOKENS_PER_S = 50_000.0
LINK = 20 * KIB**3


def measured(policy: HistoryPolicy, *, latency_s: float, speed: float, reads: int = 9) -> None:
    for _ in range(reads):
        policy.arrived("d", KIB**3, latency_s=latency_s, transfer_s=KIB**3 / speed)


def asked(
    policy: HistoryPolicy, tokens: int, *, rate: float = TOKENS_PER_S, now: float = 0.0
) -> int | None:
    return policy.least_tokens("d", tokens, token_bytes=TOKEN_BYTES, tokens_per_s=rate, now=now)


def probed(*, latency_s: float, speed: float) -> HistoryPolicy:
    policy = HistoryPolicy()
    for _ in range(PROBES):
        assert asked(policy, 1) == 1, "a new link is probed"
    measured(policy, latency_s=latency_s, speed=speed)
    return policy


def test_both_ways_take_the_same_time_at_the_least_number_of_tokens() -> None:
    for latency_s in (1e-4, 3e-3, 0.2):
        least = least_tokens(
            token_bytes=TOKEN_BYTES,
            bytes_per_s=LINK,
            latency_s=latency_s,
            tokens_per_s=TOKENS_PER_S,
        )
        read_s = latency_s + least * TOKEN_BYTES / LINK
        assert read_s == pytest.approx(least / TOKENS_PER_S)


@pytest.mark.parametrize("speed", [1.0, TOKEN_BYTES * TOKENS_PER_S])
def test_link_that_carries_fewer_tokens_than_are_computed_is_never_used(speed: float) -> None:
    least = least_tokens(
        token_bytes=TOKEN_BYTES, bytes_per_s=speed, latency_s=0, tokens_per_s=TOKENS_PER_S
    )
    assert math.isinf(least)


def test_short_history_is_computed_and_long_history_is_read() -> None:
    policy = probed(latency_s=3e-3, speed=LINK)
    least = math.ceil(3e-3 / (1 / TOKENS_PER_S - TOKEN_BYTES / LINK))
    assert 200 < least < 250
    assert asked(policy, least - 1) is None
    assert asked(policy, 4096) is not None
    assert asked(policy, least) == least


def test_a_change_to_reading_needs_a_gain() -> None:
    policy = probed(latency_s=3e-3, speed=LINK)
    gain_s = SWITCH_BELOW / TOKENS_PER_S - TOKEN_BYTES / LINK
    least = math.ceil(3e-3 / gain_s)
    assert asked(policy, 1) is None
    assert asked(policy, least - 1) is None
    assert asked(policy, least) == least
    assert asked(policy, least - 1) == math.ceil(3e-3 / (1 / TOKENS_PER_S - TOKEN_BYTES / LINK))


def test_measurements_decide_after_the_probes() -> None:
    policy = HistoryPolicy()
    assert [asked(policy, 16) for _ in range(5)] == [1] * 5, "no READ has ended"
    measured(policy, latency_s=1.0, speed=LINK)
    assert asked(policy, 16) is None
    assert asked(policy, 16, rate=0.0) == 1, "no prompt was computed"


def test_slow_link_is_measured_again_after_some_prompts() -> None:
    policy = probed(latency_s=1.0, speed=LINK)
    found = [asked(policy, 64) for _ in range(2 * EXPLORE_EVERY)]
    assert [at for at, least in enumerate(found) if least] == [
        EXPLORE_EVERY - 1,
        2 * EXPLORE_EVERY - 1,
    ]
    measured(policy, latency_s=1e-6, speed=LINK)
    assert asked(policy, 64) == 1


def test_nothing_is_read_for_a_while_after_a_failure() -> None:
    policy = probed(latency_s=1e-6, speed=LINK)
    policy.failed("d", 100.0)
    assert asked(policy, 4096, now=100.0 + AVOID_S - 1) is None
    assert policy.least_tokens("other", 1, token_bytes=1, tokens_per_s=1, now=101) == 1
    assert asked(policy, 4096, now=100.0 + AVOID_S) == 1


def test_link_of_a_worker_that_has_left_is_forgotten() -> None:
    policy = probed(latency_s=1.0, speed=LINK)
    assert asked(policy, 16) is None
    policy.forget("d")
    policy.forget("d")
    assert asked(policy, 16) == 1


def test_speed_is_that_of_long_reads() -> None:
    """Each READ of this link takes 1 ms more than its bytes need at full speed."""
    policy = probed(latency_s=1e-3, speed=LINK)
    for tokens in (16, 32, 16, 48, 16):
        nbytes = tokens * TOKEN_BYTES
        policy.arrived("d", nbytes, latency_s=1e-3, transfer_s=1e-3 + nbytes / LINK)
    assert asked(policy, 4096) is not None


def test_much_longer_history_than_any_before_is_read() -> None:
    policy = HistoryPolicy()
    for _ in range(PROBES):
        asked(policy, 16)
        policy.arrived("d", 16 * TOKEN_BYTES, latency_s=5e-3, transfer_s=5e-3)
    assert asked(policy, 16) is None
    assert asked(policy, 32) is None
    assert asked(policy, 33) == 1
    policy.arrived("d", 33 * TOKEN_BYTES, latency_s=5e-3, transfer_s=5e-3)
    assert asked(policy, 33) is None


def test_one_slow_read_changes_nothing() -> None:
    policy = probed(latency_s=1e-3, speed=LINK)
    policy.arrived("d", KIB**3, latency_s=30.0, transfer_s=30.0)
    assert asked(policy, 4096) is not None
