"""Numbers of the DeInfer paper (arXiv 2604.17709), by table.

Figures 1, 5, 6 and 7 are drawn without numbers. Table 6 has the values of Figures 5 and 6 for eight
A800 with low-rank KV, and section 5.5 two speed-ups of Figure 7.

Models are named as in `SHAPES`. ``base`` is the paper's baseline, ``deinfer`` its scheme, and
``latents`` its scheme with low-rank KV, which it marks with a dagger. Factor pairs have rank
fraction 0.6, which the paper calls a compression ratio of 40 %, unless a table says otherwise.
"""

from typing import NamedTuple

A800 = "8x A800, 80 GB"
A6000 = "8x A6000, 48 GB, no NVLink"
ALL_RANKS = 8
"""Number of GPUs in the tables that have only one."""
FRACTION = 0.6
MODELS = ("llama-3-70b", "llama-65b", "opt-30b")


class Latency(NamedTuple):
    """Mean time to the first token, and between tokens, in milliseconds."""

    first_token: float
    gap: float


class Layer(NamedTuple):
    """Time of one layer, in milliseconds."""

    compute: float
    communication: float


class Graphs(NamedTuple):
    """A figure without and with CUDA graphs for decode steps."""

    without: float
    within: float


ELEMENTS = {"base": 167_936, "deinfer": 37_276}
"""Table 1, section 4.1: elements per token and layer of LLaMA-3-70B. The sums of ``base`` count
twice. Those of ``deinfer`` count once; counted twice, it is 53,660."""
ELEMENTS_ON_THE_LINK = {"base": 167_936, "deinfer": 53_660}

A6000_LATENCY: dict[str, dict[str, Latency]] = {
    "llama-3-70b": {
        "base": Latency(21740, 812),
        "deinfer": Latency(3633, 172),
        "latents": Latency(3703, 211),
    },
    "llama-65b": {
        "base": Latency(19341, 764),
        "deinfer": Latency(3489, 181),
        "latents": Latency(3626, 312),
    },
    "opt-30b": {
        "base": Latency(6999, 311),
        "deinfer": Latency(1594, 101),
        "latents": Latency(1704, 190),
    },
}
"""Table 3, section 5.3: 128 prompts of 32 tokens, 256 generated, on `A6000`."""


def _latencies(first_token: dict[str, str], gap: dict[str, str]) -> dict[str, list[Latency]]:
    """Return, for each method, the latencies of all columns of Table 4."""
    return {
        method: [
            Latency(float(one), float(two))
            for one, two in zip(first_token[method].split(), gap[method].split(), strict=True)
        ]
        for method in first_token
    }


A800_RANKS = (2, 4, 8)
_A800_WITHOUT_NVLINK = _latencies(
    {
        "base": "8950 10064 10764 8164 9359 10451 3126 3566 3845",
        "deinfer": "2137 2110 2246 2192 2088 1812 960 927 944",
        "latents": "2484 2102 2093 2216 1840 2085 940 878 906",
    },
    {
        "base": "156 122 96 206 103 101 54 47 47",
        "deinfer": "108 88 87 115 91 88 57 47 46",
        "latents": "143 115 105 660 354 216 283 154 101",
    },
)
_A800_WITH_NVLINK = _latencies(
    {
        "base": "1662 1499 1605 1525 1417 1461 724 654 649",
        "deinfer": "1463 983 797 1162 875 749 581 448 443",
        "latents": "1377 948 817 1214 901 782 640 514 457",
    },
    {
        "base": "156 115 93 191 98 94 50 42 41",
        "deinfer": "90 76 78 92 64 56 50 37 33",
        "latents": "127 96 93 642 330 184 276 146 86",
    },
)


def a800_latency(model: str, method: str, ranks: int, *, nvlink: bool) -> Latency | None:
    """Return a cell of Table 4, section 5.3; None if the table does not have it.

    The load is that of `A6000_LATENCY`, on A800.
    """
    if model not in MODELS or ranks not in A800_RANKS:
        return None
    columns = (_A800_WITH_NVLINK if nvlink else _A800_WITHOUT_NVLINK)[method]
    return columns[MODELS.index(model) * len(A800_RANKS) + A800_RANKS.index(ranks)]


A800_LAYER: dict[tuple[bool, int], dict[str, Layer]] = {
    (False, 2): {"base": Layer(2.352, 12.182), "deinfer": Layer(1.809, 0.977)},
    (False, 4): {"base": Layer(1.174, 14.853), "deinfer": Layer(1.038, 1.156)},
    (False, 8): {"base": Layer(1.112, 16.051), "deinfer": Layer(0.787, 1.285)},
    (True, 2): {"base": Layer(2.391, 0.891), "deinfer": Layer(1.792, 0.232)},
    (True, 4): {"base": Layer(1.176, 1.240), "deinfer": Layer(1.041, 0.267)},
    (True, 8): {"base": Layer(1.116, 1.369), "deinfer": Layer(0.782, 0.247)},
}
"""Table 5, section 5.4, by whether NVLink is used and the number of ranks: a layer of LLaMA-3-70B
on A800. The paper does not state the number of tokens."""

A800_GRAPHS: dict[tuple[str, bool], dict[str, Graphs]] = {
    ("llama-3-70b", False): {
        "high load": Graphs(2068, 2168),
        "mild load": Graphs(816, 978),
        "gap": Graphs(118, 114),
    },
    ("llama-3-70b", True): {
        "high load": Graphs(3488, 3834),
        "mild load": Graphs(831, 1379),
        "gap": Graphs(97, 93),
    },
    ("llama-65b", False): {
        "high load": Graphs(1435, 1477),
        "mild load": Graphs(552, 587),
        "gap": Graphs(279, 202),
    },
    ("llama-65b", True): {
        "high load": Graphs(2011, 2217),
        "mild load": Graphs(660, 713),
        "gap": Graphs(249, 173),
    },
}
"""Table 6, section 5.6, by model and whether NVLink is used: tokens/s of two loads, and
milliseconds between tokens, with low-rank KV on `A800`."""

SPEED_UPS: dict[tuple[float, bool], float] = {(0.4, True): 2.25, (0.4, False): 8.81}
"""Section 5.5, by rank fraction and whether NVLink is used: tokens/s of ``deinfer`` divided by
those of ``base`` in Figure 7, for LLaMA-3-70B on `A800`."""
