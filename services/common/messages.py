"""Messages of the router's HTTP API: their base class, and the bounded types of their fields."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TOKENS = 1 << 31
"""Maximum tokens of one request."""
MAX_PAGES = 1 << 31
MAX_PAGE_GROUPS = 64
MAX_QUEUE_TOKENS = (1 << 63) - 1
"""Maximum tokens of all requests of a worker."""
MAX_BYTES = (1 << 63) - 1
"""Maximum value of a byte counter."""
MAX_ADMITTED = 8192
"""Maximum number of placement ids in one heartbeat."""
MAX_EXCLUDED = 64
MAX_CHOICES = 1024
MAX_WEIGHT = 1000
MAX_SALT_BYTES = 64
"""Maximum size of the salt of cached KV between gateways and workers."""
MAX_BAD_WORDS = 128
"""Maximum bad words of a request between gateways and workers, as sequences of tokens."""
MAX_BAD_WORD_TOKENS = 16
MAX_DEADLINE_S = 86_400
"""Maximum time of a request in all services, seconds."""
MAX_WAIT_S = 3600
"""Maximum time of a request in the queue of a router, seconds."""
MAX_STEP_S = 86_400.0
"""Maximum duration of an engine step, seconds."""
MAX_PRIORITY = 100
PLACEMENT_ID = r"^[A-Za-z0-9-]{1,64}$"

WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Epoch = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
PlacementId = Annotated[str, Field(pattern=PLACEMENT_ID)]
Address = Annotated[
    str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$", max_length=261)
]
Label = Annotated[str, Field(max_length=256)]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], Field(max_length=64)]
QueueTokens = Annotated[int, Field(ge=0, le=MAX_QUEUE_TOKENS)]
Pages = Annotated[int, Field(ge=0, le=MAX_PAGES)]
PagesByGroup = Annotated[dict[Label, Pages], Field(max_length=MAX_PAGE_GROUPS)]
Sequences = Annotated[int, Field(ge=0, le=1 << 20)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
BytesByGroup = Annotated[dict[Label, Bytes], Field(max_length=MAX_PAGE_GROUPS)]
Count = Annotated[int, Field(ge=0)]
"""Sum of bounded values. It has no maximum of its own."""


class Message(BaseModel):
    """A JSON object without other fields than those declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
