"""Distributions of lengths: means, quantiles, mixes and errors."""

import pytest

from services.common.errors import SettingsError
from services.sizing.lengths import Lengths


def test_fixed_and_uniform_lengths() -> None:
    assert Lengths.parse("fixed:512").points == (512.0,) * 1000
    uniform = Lengths.parse("uniform:100,300")
    assert uniform.mean == pytest.approx(200)
    assert uniform.quantile(0.95) == pytest.approx(290, abs=1)
    assert uniform.mean_square == pytest.approx(200**2 + 200**2 / 12, rel=1e-4)


def test_lognormal_has_the_given_mean_as_in_the_load_generator() -> None:
    found = Lengths.parse("lognormal:1000,0.6")
    assert found.mean == pytest.approx(1000, rel=0.005)
    assert found.quantile(0.5) == pytest.approx(835, abs=2)  # 1000 exp(-0.18)
    assert found.quantile(0.95) == pytest.approx(835 * 2.683, rel=0.01)  # exp(0.6 * 1.645)


def test_mix_is_weighted() -> None:
    found = Lengths.parse("3*fixed:100 + 1*fixed:900")
    assert found.mean == pytest.approx(300)
    assert (found.quantile(0.75), found.quantile(0.76)) == (100, 900)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "512", "fixed", "fixed:", "fixed:0", "fixed:1,2", "fixed:nan", "fixed:inf"),
        *("uniform:3,2", "uniform:0,5", "lognormal:10", "lognormal:10,0", "normal:1,2"),
        *("-1*fixed:3", "0*fixed:3", "x*fixed:3", "fixed:3+", "nan*fixed:3"),
    ],
)
def test_other_forms_are_refused(spec: str) -> None:
    with pytest.raises(SettingsError, match="not a distribution of lengths"):
        Lengths.parse(spec)
