"""Token embeddings. On the CPU in fp32, they share memory with the LM head if both are equal."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from runtime.layers.linear import LinearOp, PackedLinear, uses_packed_layout
from runtime.layers.stored_weight import StoredWeight


def embedding_op(weight: Tensor, tied_head: LinearOp | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function from token ids, int64 `[n]`, to their rows of a weight, `[n, hidden]`.

    Args:
        weight: `[vocab, hidden]`.
        tied_head: the linear layer with the same weight, if there is one.
    """
    stored = None
    if isinstance(tied_head, PackedLinear):
        stored = tied_head.stored
    elif uses_packed_layout(weight.device, weight.dtype):
        stored = StoredWeight.compact(weight)
    return stored.rows if stored else partial(functional.embedding, weight=weight)
