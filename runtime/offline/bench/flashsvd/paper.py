"""Numbers of the FlashSVD v1.5 paper for encoders, on its own cards.

Figures 9 to 13 are drawn without numbers.
"""

from typing import NamedTuple


class Figures(NamedTuple):
    """Latency of a batch in milliseconds, inputs per second, and peak memory in MB."""

    ms: float
    throughput: float
    peak: float


TABLE_5 = {
    "naive": Figures(51.34, 623.3, 989.2),
    "sdpa": Figures(25.33, 1263.1, 605.2),
    "flashsvd": Figures(44.40, 720.8, 341.4),
    "flashsvd15": Figures(22.52, 1421.0, 343.9),
}
"""Table 5, appendix B.1: BERT with factor pairs, batches of 32, task MNLI. Its figures for QQP and
STS-B differ by less than 1.1 %. The paper states neither the ranks nor the length nor the card."""
OURS = "flashsvd15"
"""The paper's backend with which ours is compared."""
