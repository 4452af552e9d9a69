"""The MLP of an encoder layer, where backends may replace it."""

from collections.abc import Callable

from torch import Tensor

FeedForward = Callable[[Tensor], Tensor]
"""The MLP with its residual connection: ``x + down(activation(up(x)))``, `[n, hidden]` to the same.

The result may not depend on other rows. ``x`` may be overwritten."""


def feed_forward(
    up: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
    down: Callable[[Tensor, Tensor], Tensor],
) -> FeedForward:
    """Return the MLP over two linears.

    Args:
        up: first linear, `[n, hidden]` to `[n, inner]`.
        activation: function of `[n, inner]`.
        down: second linear as ``down(inner, x)``, which adds its output to ``x``.
    """
    return lambda x: down(activation(up(x)), x)
