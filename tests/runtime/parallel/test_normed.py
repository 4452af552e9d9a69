"""Messages that carry the sums of squares of an RMSNorm, in Triton's interpreter or on a GPU."""

import pytest
import torch

from runtime.parallel.normed_ops import pack, scaled
from tests.runtime.device import DEVICE

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 8, 8), (3, 1032, 24), (2, 40, 1500)])
def test_sum_of_messages_is_that_of_the_normed_input(
    size: int, rows: int, width: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def inputs(columns: int) -> list[torch.Tensor]:
        parts = [torch.randn(rows, columns, generator=generator) for _ in range(size)]
        return [part.bfloat16().to(DEVICE) for part in parts]

    addends, xs = inputs(width), inputs(columns)
    packed = [pack(addends[rank], xs[rank], rank, size) for rank in range(size)]
    for rank, message in enumerate(packed):
        assert message[:, :width].equal(addends[rank])
        others = [at for at in range(width, message.shape[1]) if (at - width) // 2 != rank]
        assert not message[:, others].any()
    found = scaled(torch.stack(packed).float().sum(0).bfloat16(), width, size, size * columns, 1e-5)
    whole = torch.cat(xs, dim=1).float()
    total = torch.stack(addends).float().sum(0).bfloat16().float()
    expected = total * torch.rsqrt(whole.square().mean(1, keepdim=True) + 1e-5)
    # Triton's interpreter truncates to bf16.
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=0)
