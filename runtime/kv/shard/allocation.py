"""Bits of groups of PCA coefficients by dynamic programming (Shard, section 5)."""

import math
from collections.abc import Sequence

from runtime.errors import KVFormatError

DROP_PENALTY = 4.0
"""Factor on the error of dropped groups, which harms attention more than noise of equal energy."""
ERRORS = {2: 0.1188, 4: 0.0141, 6: 0.00122, 8: 0.000103}
"""Mean squared error of a code of N(0, 1) by its bits, with the steps of `codes.STEPS`."""
_FIRST = 4
"""Minimum bits of the first group: codes of 2 bits cannot mark coefficients that are not finite."""


def allocate(variances: Sequence[float], budget: int) -> list[int]:
    """Return the bits of each group that minimize the total error.

    The error of a group is its variance times that of `ERRORS`, or `DROP_PENALTY` times its
    variance if it has 0 bits.

    Args:
        variances: sum of the variances of the coefficients of each group, descending.
        budget: maximum sum of the bits of all groups.

    Raises:
        KVFormatError: the budget is too small for the first group.
    """
    costs = {0: DROP_PENALTY, **ERRORS}
    if budget < _FIRST or not variances:
        raise KVFormatError(f"{budget} bits do not suffice for the first group of coefficients")
    # least[b] is the least error of the groups so far with b bits, chosen[g][b] the bits of group g
    least = [0.0] + [math.inf] * budget
    chosen: list[list[int]] = []
    for index, variance in enumerate(variances):
        errors = [math.inf] * (budget + 1)
        bits_of = [0] * (budget + 1)
        for bits, cost in costs.items():
            if index == 0 and bits < _FIRST:
                continue
            for used in range(bits, budget + 1):
                error = least[used - bits] + cost * variance
                if error < errors[used]:
                    errors[used], bits_of[used] = error, bits
        least = errors
        chosen.append(bits_of)
    used = min(range(budget + 1), key=least.__getitem__)
    found = []
    for bits_of in reversed(chosen):
        found.append(bits_of[used])
        used -= bits_of[used]
    return found[::-1]
