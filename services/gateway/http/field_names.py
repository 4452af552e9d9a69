"""Names of the fields of a chat completion in the requests of other interfaces."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.common.errors import ServiceError

_LAST_STEP = re.compile(r"(\.[^.\[\]]+|\[[0-9]+\])$")


@dataclass(frozen=True)
class FieldNames:
    """Paths of fields in the body of a client, by their paths in the `ChatBody` made of it.

    A path that is not listed belongs to its longest beginning that is: with ``tools[0].function``
    listed as ``tools[0]``, ``tools[0].function.name`` is ``tools[0].name``.
    """

    paths: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """Return the client's path of a field."""
        beginning, rest = path, ""
        while beginning not in self.paths:
            step = _LAST_STEP.search(beginning)
            if step is None:
                return path
            beginning, rest = beginning[: step.start()], step[0] + rest
        return self.paths[beginning] + rest

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Name fields of errors in the ``with`` block as the client does."""
        try:
            yield
        except ServiceError as error:
            if error.param is not None and (name := self.of(error.param)) != error.param:
                if error.message.startswith(error.param):
                    error.message = name + error.message.removeprefix(error.param)
                    error.args = (error.message,)
                error.param = name
            raise
