"""Measured figures of one kind of worker, as stored in `figures/` or written by a user."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.common.errors import SettingsError

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
    """Memory of a decode worker for KV.

    Attributes:
        bytes_per_token: by KV format.
        bytes: memory for pages; `headrace_kv_pages` times 16 times the bytes of a token.
        read_bytes_per_s: rate at which attention reads dense KV, to correct token times for
            contexts other than the measured ones; None: no correction.
    """

    bytes_per_token: dict[str, Positive]
    bytes: Positive
    read_bytes_per_s: Positive | None = None

    @model_validator(mode="after")
    def _dense_is_known(self) -> Self:
        if self.read_bytes_per_s is not None and "dense" not in self.bytes_per_token:
            raise ValueError("read_bytes_per_s needs the bytes per token of `dense`")
        return self


class Figures(_Part):
    """Figures of one model on one kind of machine.

    Attributes:
        max_running: maximum sequences on a decode worker.
        gateway_tokens_per_s: output tokens per second of one gateway.
        sources: where each figure comes from, with dates.
    """

    name: str
    sources: dict[str, str]
    prefill: Annotated[list[PrefillPoint], Field(min_length=1)]
    decode: Annotated[list[DecodePoint], Field(min_length=1)]
    max_running: Count
    kv: KVFigures | None = None
    gateway_tokens_per_s: Positive | None = None

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for name, at in (
            ("prefill", [point.tokens for point in self.prefill]),
            ("decode", [point.sequences for point in self.decode]),
        ):
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

    @property
    def overhead_s(self) -> float:
        """Part of `first_token_s` that does not occupy the prefill worker: its value at 0 tokens.

        It is the intercept of the first two points. With a single point, or if noise makes the
        second time the shorter one, all time is taken as occupied.
        """
        if len(self.prefill) == 1:
            return 0.0
        (x0, y0), (x1, y1) = [(p.tokens, p.first_ms / 1e3) for p in self.prefill[:2]]
        return max(0.0, y0 - x0 * (y1 - y0) / (x1 - x0)) if y1 > y0 else 0.0

    def first_token_s(self, tokens: float) -> float:
        """Seconds from a single request to its first token, interpolated."""
        points = [(float(p.tokens), p.first_ms / 1e3) for p in self.prefill]
        return _line([(0.0, self.overhead_s), *points], tokens)

    def token_s(self, sequences: float, context: float) -> float:
        """Seconds between two tokens of each of ``sequences`` on a decode worker, interpolated.

        The KV of a longer or shorter context than the measured one is added or subtracted, at the
        rate at which attention reads it. The result is at least the fastest measured time.
        """
        points, fastest = self.decode, min(p.token_ms for p in self.decode) / 1e3
        time_s = _line([(p.sequences, p.token_ms / 1e3) for p in points], sequences)
        if self.kv is not None and self.kv.read_bytes_per_s is not None:
            measured = _line([(p.sequences, p.context) for p in points], sequences, monotone=False)
            read = sequences * (context - measured) * self.kv.bytes_per_token["dense"]
            time_s += read / self.kv.read_bytes_per_s
        return max(time_s, fastest)


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
