"""Measured figures of one kind of worker, as stored in `figures/` or written by a user."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.pages.plan import PagePlan
from runtime.pages.sizes import PageBytes, sequence_bytes, token_bytes
from services.common.errors import SettingsError

DENSE = "dense"
FOLDER = Path(__file__).parent / "figures"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrefillPoint(_Part):
    """Time from a single request to its first token."""

    tokens: Count
    first_ms: Positive


class DecodePoint(_Part):
    """Time of an output token with several sequences on one decode worker.

    Attributes:
        context: mean tokens of a sequence, prompt included.
    """

    sequences: Positive
    context: Positive
    token_ms: Positive


class KVFigures(_Part):
    """Sizes of KV, and memory of a decode worker for it.

    Attributes:
        page_plans, page_bytes: by KV format, as workers register them (``page_plan`` and
            ``page_bytes`` in the list of workers of a router).
        bytes: memory for pages; the sum over page groups of `headrace_kv_pages` times
            ``page_bytes``.
        read_bytes_per_s: rate at which attention reads KV, by KV format, to correct token times
            for contexts other than the measured ones; formats without it are not corrected.
        link_bits_per_s: measured bandwidth of KV transfers between two workers, by kind of link.
    """

    page_plans: dict[str, PagePlan]
    page_bytes: dict[str, dict[str, int]]
    bytes: Positive
    read_bytes_per_s: dict[str, Positive] = {}
    link_bits_per_s: dict[str, Positive] = {}

    @model_validator(mode="after")
    def _formats_are_known(self) -> Self:
        unknown = self.read_bytes_per_s.keys() - self.page_plans.keys()
        if unknown:
            raise ValueError(f"page_plans lacks {', '.join(sorted(unknown))}")
        if self.page_bytes.keys() != self.page_plans.keys():
            raise ValueError("page_plans and page_bytes have different KV formats")
        for kv_format in self.page_plans:
            self._pages(kv_format)  # raises if the groups are others
        return self

    def size(self, kv_format: str, tokens: float) -> float:
        """Return the bytes of the KV of a sequence.

        Raises:
            SettingsError: if the pages of the format are unknown.
        """
        if kv_format not in self.page_plans:
            raise _unknown_format("page plan", kv_format, self.page_plans)
        pages, length = self._pages(kv_format), math.ceil(tokens)
        return sequence_bytes(pages, length) - (length - tokens) * token_bytes(pages)

    def token_bytes(self, kv_format: str) -> float:
        """Return the bytes of one token of a long sequence, outside of its window."""
        return token_bytes(self._pages(kv_format))

    def read_s_per_token(self, kv_format: str) -> float:
        """Return the seconds that attention takes to read the KV of one token; 0 if unknown."""
        rate = self.read_bytes_per_s.get(kv_format)
        return 0.0 if rate is None else self.token_bytes(kv_format) / rate

    def _pages(self, kv_format: str) -> PageBytes:
        plan = self.page_plans[kv_format]
        return PageBytes(plan, tuple(plan.count(self.page_bytes[kv_format])))


class Figures(_Part):
    """Figures of one model on one kind of machine.

    Attributes:
        decode: times of an output token, by KV format.
        max_running: maximum sequences on a decode worker.
        gateway_tokens_per_s: output tokens per second of one gateway.
        sources: where each figure comes from, with dates.
    """

    name: str
    sources: dict[str, str]
    prefill: Annotated[list[PrefillPoint], Field(min_length=1)]
    decode: Annotated[
        dict[str, Annotated[list[DecodePoint], Field(min_length=1)]], Field(min_length=1)
    ]
    max_running: Count
    kv: KVFigures | None = None
    gateway_tokens_per_s: Positive | None = None

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        measured: dict[str, list[float]] = {
            f"decode.{kv_format}": [point.sequences for point in points]
            for kv_format, points in self.decode.items()
        }
        measured["prefill"] = [point.tokens for point in self.prefill]
        for name, at in measured.items():
            if any(low >= high for low, high in pairwise(at)):
                raise ValueError(f"the points of {name} must be in ascending order")
        return self

    @classmethod
    def load(cls, name_or_path: str) -> Self:
        """Read figures by the name of a file in `FOLDER`, or by path.

        Raises:
            SettingsError: if there is no such file or its content is invalid.
        """
        packaged = FOLDER / f"{name_or_path}.json"
        path = packaged if packaged.is_file() else Path(name_or_path)
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
            raise SettingsError(
                f"cannot read figures {name_or_path}: {error.strerror}; built in: {known}"
            ) from None
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"])) or "the file"
            raise SettingsError(f"figures {path}: {where}: {fault['msg']}") from None

    @cached_property
    def square_s(self) -> float:
        """Seconds per squared prompt token, the part of attention in the time of a prompt.

        Each chunk of a prompt attends to more tokens than the one before. The value is that of the
        quadratic through the last three points. It is reduced, down to 0, if the times without this
        part would otherwise decrease from one point to the next. With fewer than three points, it
        is 0.
        """
        points = [(p.tokens, p.first_ms / 1e3) for p in self.prefill]
        if len(points) < 3:
            return 0.0
        slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]
        curvature = (slopes[-1] - slopes[-2]) / (points[-1][0] - points[-3][0])
        most = min(
            slope / (x0 + x1)
            for slope, ((x0, _), (x1, _)) in zip(slopes, pairwise(points), strict=True)
        )
        return max(0.0, min(curvature, most))

    @property
    def overhead_s(self) -> float:
        """Part of `first_token_s` that does not occupy the prefill worker: its value at 0 tokens.

        It is extrapolated from the first two points, without their quadratic part. With a single
        point, or if noise makes the second time the shorter one, it is 0.
        """
        if len(self.prefill) == 1:
            return 0.0
        (x0, y0), (x1, y1) = self._linear_part[:2]
        return max(0.0, y0 - x0 * (y1 - y0) / (x1 - x0)) if y1 > y0 else 0.0

    def first_token_s(self, tokens: float) -> float:
        """Seconds from a single request to its first token.

        Between and beyond the measured points, it is a quadratic with the coefficient `square_s`.
        """
        linear = _line([(0.0, self.overhead_s), *self._linear_part], tokens)
        return linear + self.square_s * tokens * tokens

    @property
    def _linear_part(self) -> list[tuple[float, float]]:
        """Tokens and seconds of the points of prefill, without the quadratic part."""
        return [
            (float(p.tokens), p.first_ms / 1e3 - self.square_s * p.tokens**2) for p in self.prefill
        ]

    def points(self, kv_format: str) -> list[DecodePoint]:
        """Return the measured times of an output token.

        Raises:
            SettingsError: if there are none for this format.
        """
        found = self.decode.get(kv_format)
        if found is None:
            raise _unknown_format("times of an output token", kv_format, self.decode)
        return found

    def token_s(self, sequences: float, context: float, kv_format: str = DENSE) -> float:
        """Seconds between two tokens of each of ``sequences`` on a decode worker, interpolated.

        If ``context`` differs from the measured one, the time to read the difference in KV is added
        or subtracted. Beyond the last point of this format, the increase measured with dense KV is
        added if there is one, minus the time that reading this format instead of dense KV saves.
        The result is at least the fastest measured time.

        Raises:
            SettingsError: if no time was measured for this format.
        """
        points = self.points(kv_format)
        dense = self.decode.get(DENSE, points)
        inside = sequences
        if points[-1].sequences < min(sequences, dense[-1].sequences):
            inside = points[-1].sequences
        time_s = self._interpolated(kv_format, inside, context)
        if inside < sequences:
            time_s += self._interpolated(DENSE, sequences, context)
            time_s -= self._interpolated(DENSE, inside, context)
            saved = self._read_s_per_token(DENSE) - self._read_s_per_token(kv_format)
            time_s -= (sequences - inside) * context * saved
        return max(time_s, min(p.token_ms for p in points) / 1e3)

    def _interpolated(self, kv_format: str, sequences: float, context: float) -> float:
        points = self.decode[kv_format]
        time_s = _line([(p.sequences, p.token_ms / 1e3) for p in points], sequences)
        measured = _line([(p.sequences, p.context) for p in points], sequences, monotone=False)
        return time_s + sequences * (context - measured) * self._read_s_per_token(kv_format)

    def _read_s_per_token(self, kv_format: str) -> float:
        return 0.0 if self.kv is None else self.kv.read_s_per_token(kv_format)


def _unknown_format(figure: str, kv_format: str, known: Iterable[str]) -> SettingsError:
    return SettingsError(
        f"the figures have no {figure} for KV format {kv_format!r}, only for: {', '.join(known)}"
    )


def _line(points: Sequence[tuple[float, float]], at: float, *, monotone: bool = True) -> float:
    """Interpolate linearly between points, and extrapolate the last segment.

    Before the first point, and with a single point, the result is constant.

    Args:
        monotone: raise each value to the largest one before it, to remove dips due to noise.
    """
    xs = [x for x, _ in points]
    ys = list(accumulate((y for _, y in points), max)) if monotone else [y for _, y in points]
    if len(points) == 1 or at <= xs[0]:
        return ys[0]
    after = min(bisect_left(xs, at), len(xs) - 1)
    slope = (ys[after] - ys[after - 1]) / (xs[after] - xs[after - 1])
    return ys[after - 1] + (at - xs[after - 1]) * slope
