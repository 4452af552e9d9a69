# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Messages of attention that other kernels have computed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stage"])
def send_kernel(
    values, activations, stride, target, flags, stage, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Send values to the next launch of the megakernel; see `runtime.megakernel.kernels.messages`.

    Grid `(sequences, cdiv(SIZE, BLOCK))`.

    Args:
        values: bf16 `[sequences, SIZE]`, contiguous.
        activations: int32 `[sequences, stride]`.
        target: offset of the values in a sequence's activations.
        flags: pointer to the flag of stage 0, int32.
        stage: stage of the messages.
    """
    sequence = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(values + sequence * SIZE + i, mask=i < SIZE).to(tl.uint16, bitcast=True)
    flag = tl.load(flags) + stage
    tl.store(
        activations + sequence * stride + target + i,
        bits.to(tl.int32) | (flag << 16),
        mask=i < SIZE,
    )
