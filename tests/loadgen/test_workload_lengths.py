"""Length distributions: bounds, means and syntax errors."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.lengths import Bounded, Fixed, Lengths, Lognormal, Uniform, parse_lengths
from loadgen.workload.presets import PRESETS, preset

DRAWS = 20_000


def draws(lengths: Lengths, seed: int = 0, count: int = DRAWS) -> np.ndarray:
    return lengths.draw(np.random.default_rng(seed), count)


@st.composite
def bounded(draw: st.DrawFn) -> Bounded:
    low = draw(st.integers(1, 5_000))
    high = low + draw(st.integers(0, 100_000))
    # If the mean is closer to a bound, it depends on values that are too rare for this many draws.
    share = draw(st.sampled_from([0.0, 1.0]) | st.floats(0.02, 0.98))
    return Bounded(low, low + share * (high - low), high)


@settings(max_examples=60)
@given(bounded(), st.integers(0, 99))
def test_bounded_has_its_bounds_and_mean(lengths: Bounded, seed: int) -> None:
    drawn = draws(lengths, seed)
    assert drawn.dtype == np.int64
    assert lengths.low <= drawn.min()
    assert drawn.max() <= lengths.high
    share = (lengths.mean - lengths.low) / max(1, lengths.high - lengths.low)
    variance = share * (1 - share) / 7 * (lengths.high - lengths.low) ** 2 + 1 / 4
    assert abs(drawn.mean() - lengths.mean) < 6 * math.sqrt(variance / DRAWS), "6 sigma"


@settings(max_examples=30)
@given(st.floats(20, 5_000), st.floats(0, 0.8), st.integers(0, 99))
def test_lognormal_has_its_mean_and_sigma(mean: float, sigma: float, seed: int) -> None:
    drawn = draws(Lognormal(mean, sigma), seed)
    deviation = mean * math.sqrt(math.expm1(sigma**2)) + 0.5
    assert abs(drawn.mean() - mean) < 6 * deviation / math.sqrt(DRAWS), "6 sigma"
    if mean > 500:
        assert np.log(drawn).std() == pytest.approx(sigma, rel=0.05, abs=2e-3)


def test_draws_are_at_least_one_token() -> None:
    drawn = draws(Lognormal(1, 2))
    assert drawn.min() == 1
    assert drawn.max() > 10


def test_uniform_includes_both_ends() -> None:
    drawn = draws(Uniform(3, 6))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [3, 4, 5, 6]
    assert counts.min() > DRAWS / 4 - 6 * math.sqrt(DRAWS * 3 / 16), "6 sigma"
    assert Uniform(3, 6).mean == 4.5


@pytest.mark.parametrize(
    "lengths", [Fixed(7), Uniform(1, 900), Lognormal(500, 0.6), Bounded(1, 300.5, 900)]
)
def test_same_generator_gives_the_same_lengths(lengths: Lengths) -> None:
    assert draws(lengths, 1).tolist() == draws(lengths, 1).tolist()
    varies = not isinstance(lengths, Fixed)
    assert (draws(lengths, 1).tolist() != draws(lengths, 2).tolist()) == varies


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("fixed:128", Fixed(128)),
        ("uniform:10,200", Uniform(10, 200)),
        ("lognormal:500,0.6", Lognormal(500, 0.6)),
        ("bounded:106,315,821", Bounded(106, 315, 821)),
        (" bounded: 1, 2.5, 3", Bounded(1, 2.5, 3)),
    ],
)
def test_syntax_of_distributions(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128", "expected fixed:TOKENS, uniform:LOW,HIGH"),
        ("gauss:1,2", "not a length distribution"),
        ("fixed", "does not match fixed:TOKENS"),
        ("fixed:", "does not match"),
        ("fixed:1,2", "does not match"),
        ("fixed:many", "does not match"),
        ("fixed:nan", "does not match"),
        ("fixed:inf", "does not match"),
        ("fixed:0", "1 to 10000000, not 0"),
        ("fixed:1e9", "1 to 10000000"),
        ("fixed:1.5", "1.5 is not a whole number"),
        ("uniform:10,9", "from 10 to 9"),
        ("uniform:0,9", "from 0 to 9"),
        ("lognormal:500", "does not match lognormal:MEAN,SIGMA"),
        ("lognormal:0,1", "mean must be"),
        ("lognormal:5,-1", "sigma must be 0 to 3"),
        ("lognormal:5,100", "sigma must be 0 to 3"),
        ("bounded:10,9,20", "mean of 9"),
        ("bounded:10,21,20", "mean of 21"),
    ],
)
def test_invalid_distribution_is_explained(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_lengths(text)
    assert message in str(raised.value)
    assert text in str(raised.value)


TABLE_6 = {
    "imdb": ((315, 106, 821), (37, 16, 87)),
    "arxiv": ((6300, 1600, 14100), (243, 29, 464)),
    "cocktail": ((49700, 9400, 104900), (159, 44, 246)),
    "humaneval": ((204, 75, 697), (139, 11, 552)),
    "pg19": ((277, 138, 419), (61500, 24300, 97500)),
}


def test_presets_match_the_papers_table() -> None:
    assert PRESETS.keys() == TABLE_6.keys()
    for name, sides in TABLE_6.items():
        made = preset(name)
        for lengths, (mean, low, high) in zip((made.inputs, made.outputs), sides, strict=True):
            assert (lengths.mean, lengths.low, lengths.high) == (mean, low, high)


@given(st.sampled_from(list(TABLE_6)), st.floats(1e-7, 20))
def test_scaled_preset_keeps_its_proportions_and_at_least_one_token(
    name: str, scale: float
) -> None:
    sides: list[Callable[..., Bounded]] = [lambda p: p.inputs, lambda p: p.outputs]
    for side in sides:
        whole, scaled = side(preset(name)), side(preset(name, scale))
        assert scaled.mean == max(1.0, whole.mean * scale)
        assert 0 <= scaled.high - whole.high * scale < 1.001
        assert -1.001 < scaled.low - whole.low * scale <= 1
        assert draws(scaled, count=100).min() >= 1


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("c4", 1.0, "presets are imdb, arxiv"),
        ("imdb", 0.0, "above 0"),
        ("imdb", -1.0, "above 0"),
        ("imdb", math.nan, "above 0"),
        ("imdb", math.inf, "above 0"),
        ("imdb", 1e9, "10000000"),
    ],
)
def test_invalid_preset_is_explained(name: str, scale: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preset(name, scale)
