"""Number formatting: three significant digits, one unit per quantity, and plurals."""

NOTHING = "–"
"""Placeholder for a missing number."""

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(value: float | None) -> str:
    """Format with three significant digits, or as an integer if at least 100: 1.25, 12.3, 1,235."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 99.95 or size == 0 or (float(value).is_integer() and size < 100):
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def ms(seconds: float | None) -> str:
    """Format as milliseconds without the unit; trailing zeros are kept to align columns."""
    if seconds is None:
        return NOTHING
    value = 1e3 * seconds
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Format a fraction as a percentage without the % sign; only exact values become 0 or 100."""
    if share is None:
        return NOTHING
    value = 100 * share
    if 0 < value < 0.1:
        return "< 0.1"
    if 99.9 < value < 100:
        return "> 99.9"
    return f"{value:.0f}" if value in (0, 100) else f"{value:.1f}"


def size(count: float | None) -> str:
    """Format a number of bytes with its unit."""
    if count is None:
        return NOTHING
    unit = 0
    while count >= 1024 and unit < len(_BYTES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{plain(count)} {_BYTES[unit]}"


def exact(value: float) -> str:
    """Format a number that a user chose, such as a rate, with its own digits: 0.5, 10.3, 1,500."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def counted(count: float, noun: str) -> str:
    """Format a number with what it counts: "1 request", "0.5 requests", "1,500 requests"."""
    return f"{exact(count)} {noun}{'' if count == 1 else 's'}"


def tick(value: float) -> str:
    """Format an axis label: 0.5, 200, 5,000, 20k, 3M."""
    for large, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= large:
            return f"{value / (1e3 if letter == 'k' else 1e6):g}{letter}"
    return f"{value:,g}" if abs(value) < 1e3 else f"{value:,.0f}"
