"""Flags of `headrace calibrate` for compressed KV formats. Imports nothing that is slow to load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from runtime.kv.names import CALIBRATED
from services.common.errors import SettingsError

_OPTIONS = (
    *("removal_rate", "rank", "group_heads"),
    *("step", "values", "k_basis", "allocation", "group"),
    *("bits", "quantize_bits", "k_outliers", "v_outliers", "levels", "rope"),
)
"""Flags that are options of a format under the same name."""

_FLAGS = {
    "max_perplexity_increase": "--max-ppl-increase",
    "adaptive": "--no-adaptive",
    "prc": "--no-prc",
}
"""Flags whose values have other names in `Given`."""

_FORMATS = "KV formats fdc, palu, shard and kvquant"


def flag_of(name: str) -> str:
    """Return the flag that sets a value of `Given`."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def parse_fraction(text: str) -> float:
    """Return 0.01 for ``1%`` or ``0.01``."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor a percentage") from None


@dataclass(frozen=True)
class Given:
    """Values of the flags in this module; None for flags that were not given.

    Attributes:
        text: ``tokens`` and ``files``.
        search: fields of `runtime.offline.quality.search.Constraint`, and ``evaluations``.
        options: fields of the options of the formats.
    """

    text: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the values in ``arguments``: those of the command, by the names of their flags."""
        unset = {"adaptive": "no_adaptive", "prc": "no_prc"}
        return cls(
            text={"tokens": arguments["tokens"], "files": arguments["text"]},
            search={
                "max_perplexity_increase": arguments["max_ppl_increase"],
                "min_fidelity": arguments["min_fidelity"],
                "evaluations": arguments["evaluations"],
            },
            options={
                **{name: arguments[name] for name in _OPTIONS},
                **{name: False if arguments[flag] else None for name, flag in unset.items()},
                "compressed_prefill": arguments["compressed_prefill"] or None,
            },
        )

    def refuse(self, kv_format: str) -> None:
        """Check that no flag except ``--text`` was given, for a command that calibrates codebooks.

        Raises:
            SettingsError: another flag was given.
        """
        tokens = {"tokens": self.text.get("tokens")}
        for name, value in (*tokens.items(), *self.search.items(), *self.options.items()):
            if value is None:
                continue
            if name == "quantize_bits":
                raise SettingsError(
                    f"KV format {kv_format} cannot be quantized again: --quantize-bits is for the "
                    "latents of fdc and palu"
                )
            raise SettingsError(
                f"KV format {kv_format} does not support {flag_of(name)}, which is for "
                f"--kv-format {', '.join(CALIBRATED)}"
            )


Tokens = Annotated[
    int | None, typer.Option(min=64, help=f"{_FORMATS}: calibration tokens; default: 16,384")
]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option("--text", help="UTF-8 text file, repeatable; default: Python's documentation"),
]
RemovalRate = Annotated[
    float | None,
    typer.Option(help="fdc, palu: fraction of the sum of singular values to drop; default: 0.2"),
]
Rank = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="fdc, palu: rank per KV head instead of a removal rate; shard: coefficients of K",
    ),
]
MaxPplIncrease = Annotated[
    float | None,
    typer.Option(
        parser=parse_fraction,
        metavar="PERCENT",
        help="fdc, palu: search for the highest removal rate with at most this increase of "
        "perplexity, such as 1%",
    ),
]
MinFidelity = Annotated[
    float | None,
    typer.Option(
        parser=parse_fraction,
        metavar="PERCENT",
        help="fdc, palu: search for the highest removal rate with at least this top-1 agreement "
        "with exact KV, such as 99%",
    ),
]
Evaluations = Annotated[
    int | None,
    typer.Option(
        min=1, max=20, help="fdc, palu: maximum number of evaluations of a search; default: 7"
    ),
]
NoAdaptive = Annotated[
    bool, typer.Option("--no-adaptive", help="fdc: one rank per layer, not one per head")
]
NoPrc = Annotated[bool, typer.Option("--no-prc", help="fdc: project K before RoPE, not after it")]
CompressedPrefill = Annotated[
    bool,
    typer.Option(
        "--compressed-prefill", help="fdc: use projected queries and keys in prefill attention, too"
    ),
]
GroupHeads = Annotated[
    int | None, typer.Option(min=1, help="palu: KV heads that share latents of K; default: 4")
]
Step = Annotated[
    float | None,
    typer.Option(help="shard: 4-bit quantization step in standard deviations; default: 0.4"),
]
Values = Annotated[
    str | None, typer.Option(help="shard: codes of V: scalar, or vq (256 vectors); default: scalar")
]
KBasis = Annotated[
    str | None,
    typer.Option(help="shard: basis of K: pca, or commuting (with RoPE); default: pca"),
]
Allocation = Annotated[
    str | None,
    typer.Option(help="shard: bits of K: uniform, or dynamic (0 to 8 by group); default: uniform"),
]
Group = Annotated[
    int | None,
    typer.Option(min=4, help="shard: group size of the dynamic allocation; default: 64"),
]
Bits = Annotated[
    int | None, typer.Option(min=3, max=4, help="kvquant: bits of a code, 3 or 4; default: 4")
]
QuantizeBits = Annotated[
    int | None,
    typer.Option(
        min=3, max=4, help="fdc, palu: quantize the latents as kvquant does, to 3 or 4 bits"
    ),
]
KOutliers = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=4,
        help="kvquant, --quantize-bits: exact elements of K per token and KV head; default: 2",
    ),
]
VOutliers = Annotated[
    int | None,
    typer.Option(
        min=0, max=4, help="kvquant, --quantize-bits: exact elements of V per token; default: 0"
    ),
]
Levels = Annotated[
    str | None,
    typer.Option(
        help="kvquant, --quantize-bits: levels of the codes, kmeans or uniform; default: kmeans"
    ),
]
Rope = Annotated[
    str | None, typer.Option(help="kvquant: quantize K before or after RoPE; default: after")
]
