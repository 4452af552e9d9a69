# mypy: ignore-errors
"""The MLP of factor pairs between its outer factors, for Hopper GPUs, in Gluon.

The kernel computes ``y = V_down gelu(U_up x + b)`` for `x` in the rank space of `up`. The inner
activations, which are much wider than both ranks, stay in registers: a program computes 64 of them
for each of its tokens, multiplies them by the matching columns of V_down, and continues with the
next 64, as attention does with keys and values. The structure is that of
`runtime.attention.kernels.prefill_hopper`: one warp loads tiles of U_up and V_down into a ring in
shared memory, and each of two warp groups starts the first matmul of a tile together with the
second matmul of the previous tile, and computes GELU while the second one runs.

All tiles consist of panels of 64 rows and 64 columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from runtime.kernels.compat import load_block

PANEL = gl.constexpr(64)
"""Rows and columns of a panel, tokens per warp group, and inner activations per tile."""
TOKENS = gl.constexpr(2 * PANEL.value)
"""Tokens per program."""
PANEL_BYTES = gl.constexpr(PANEL.value * PANEL.value * 2)
SCALE_0, SCALE_1, SCALE_2 = (
    gl.constexpr(value) for value in (2.30054159, 0.107479519, -0.00112060522)
)
"""Coefficients of `activated`."""
LARGEST_SQUARE = gl.constexpr(49.0)


@gluon.jit
def activated(x):
    """Return the GELU of fp32 values, with an error below 6.3e-5.

    ``gelu(x) = x / (1 + 2^-q(x))``, where ``q`` approximates the base-2 logit of the normal
    distribution by an odd polynomial. For any result, the error is less than a third of the
    largest error of rounding to bf16, or less than 4e-6 near 0.
    """
    square = gl.minimum(x * x, LARGEST_SQUARE)
    q = x * (SCALE_0 + square * (SCALE_1 + square * SCALE_2))
    return x / (1.0 + gl.exp2(-q))


@gluon.jit
def load_rows(
    item, up, tile, ring, ready, free,
    UP: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Wait until the slot of ``item`` is free, then load rows of U_up."""
    slot = item % SLOTS
    mbarrier.wait(free.index(slot), item // SLOTS & 1 ^ 1)
    mbarrier.expect(ready.index(slot), UP * PANEL_BYTES)
    for p in gl.static_range(UP):
        load_block(up, [tile * PANEL, p * PANEL], ready.index(slot), ring.index(slot * PANELS + p))


@gluon.jit
def load_columns(
    item, down, tile, ring, ready, free,
    DOWN: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Wait until the slot of ``item`` is free, then load columns of V_down."""
    slot = item % SLOTS
    mbarrier.wait(free.index(slot), item // SLOTS & 1 ^ 1)
    mbarrier.expect(ready.index(slot), DOWN * PANEL_BYTES)
    for p in gl.static_range(DOWN):
        load_block(
            down, [p * PANEL, tile * PANEL], ready.index(slot), ring.index(slot * PANELS + p)
        )


@gluon.jit
def load_tiles(
    x, up, down, first, tiles, inputs, ring, inputs_ready, ready, free,
    UP: gl.constexpr, DOWN: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the program's rows of ``x``, then rows of U_up and columns of V_down by turns.

    Rows of tile t are item 2 t - 1 of the ring, or item 0; its columns are item 2 t + 2. With three
    slots, the next rows are thus in the ring when a tile begins, and its columns are loaded when
    its first matmul has ended.
    """
    mbarrier.expect(inputs_ready, 2 * UP * PANEL_BYTES)
    for group in gl.static_range(2):
        for p in gl.static_range(UP):
            load_block(
                x, [first + group * PANEL, p * PANEL], inputs_ready, inputs.index(group * UP + p)
            )
    load_rows(0, up, 0, ring, ready, free, UP, PANELS, SLOTS)
    for tile in range(1, tiles):
        load_rows(2 * tile - 1, up, tile, ring, ready, free, UP, PANELS, SLOTS)
        load_columns(2 * tile, down, tile - 1, ring, ready, free, DOWN, PANELS, SLOTS)
    load_columns(2 * tiles, down, tiles - 1, ring, ready, free, DOWN, PANELS, SLOTS)


@gluon.jit
def start_inner(
    item, inputs, ring, ready,
    GROUP: gl.constexpr, UP: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start UP matmuls for the inner activations of a tile, `[PANEL, PANEL]`."""
    slot = item % SLOTS
    mbarrier.wait(ready.index(slot), item // SLOTS & 1)
    made = gl.zeros([PANEL, PANEL], gl.float32, LAYOUT)
    for p in gl.static_range(UP):
        factor = ring.index(slot * PANELS + p).permute((1, 0))
        made = warpgroup_mma(
            inputs.index(GROUP * UP + p), factor, made, use_acc=p > 0, is_async=True
        )
    return made


@gluon.jit
def start_outputs(
    item, weights, acc, ring, ready,
    DOWN: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Start DOWN matmuls that add a tile to the outputs, a tuple of `[PANEL, PANEL]`."""
    slot = item % SLOTS
    mbarrier.wait(ready.index(slot), item // SLOTS & 1)
    made = ()
    for p in gl.static_range(DOWN):
        factor = ring.index(slot * PANELS + p).permute((1, 0))
        made = made + (warpgroup_mma(weights, factor, acc[p], is_async=True),)
    return made


@gluon.jit
def wait_for_all(acc, DOWN: gl.constexpr):
    """Wait until all matmuls have ended. Return the values of ``acc`` as a tuple."""
    if DOWN == 1:
        done = (warpgroup_mma_wait(0, deps=[acc[0]]),)
    else:
        done = warpgroup_mma_wait(0, deps=acc)
    return done


@gluon.jit
def with_bias(made, biases, tile, inner):
    """Add the biases of a tile."""
    j = tile * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, made.type.layout))
    return made + gl.load(biases + j, mask=j < inner, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def transform(
    inputs, ring, inputs_ready, ready, free, biases, inner, tiles, y, first, tokens, width,
    GROUP: gl.constexpr, UP: gl.constexpr, DOWN: gl.constexpr, PANELS: gl.constexpr,
    SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute and store the outputs of a warp group's 64 tokens."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PANEL, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    element: gl.constexpr = y.dtype.element_ty
    acc = ()
    for _ in gl.static_range(DOWN):
        acc = acc + (gl.zeros([PANEL, PANEL], gl.float32, LAYOUT),)
    mbarrier.wait(inputs_ready, 0)
    made = start_inner(0, inputs, ring, ready, GROUP, UP, PANELS, SLOTS, LAYOUT)
    made = warpgroup_mma_wait(0, deps=[made])
    mbarrier.arrive(free.index(0))
    weights = activated(with_bias(made, biases, 0, inner))
    weights = gl.convert_layout(weights.to(element), OPERAND)
    for tile in range(1, tiles):
        made = start_inner(2 * tile - 1, inputs, ring, ready, GROUP, UP, PANELS, SLOTS, LAYOUT)
        started = start_outputs(2 * tile, weights, acc, ring, ready, DOWN, PANELS, SLOTS)
        made = warpgroup_mma_wait(DOWN, deps=[made])
        mbarrier.arrive(free.index((2 * tile - 1) % SLOTS))
        following = activated(with_bias(made, biases, tile, inner))
        acc = wait_for_all(started, DOWN)
        mbarrier.arrive(free.index(2 * tile % SLOTS))
        weights = gl.convert_layout(following.to(element), OPERAND)
    acc = start_outputs(2 * tiles, weights, acc, ring, ready, DOWN, PANELS, SLOTS)
    acc = wait_for_all(acc, DOWN)
    row = first + GROUP * PANEL + gl.arange(0, PANEL, gl.SliceLayout(1, LAYOUT))
    for p in gl.static_range(DOWN):
        column = p * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, LAYOUT))
        at = row.to(gl.int64)[:, None] * width + column[None, :]
        valid = (row < tokens)[:, None] & (column < width)[None, :]
        gl.store(y + at, acc[p].to(element), mask=valid)


@gluon.jit(do_not_specialize=["tokens"])
def rank_space_mlp_kernel(
    x, up, down, biases, y, inner, tokens, width,
    UP: gl.constexpr, DOWN: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Compute ``y`` for TOKENS tokens per program. Grid `(ceil(tokens / TOKENS),)`.

    Args:
        x: TMA descriptor of bf16 `[tokens, rank of up]`, as all descriptors with boxes of
            `[PANEL, PANEL]`.
        up: TMA descriptor of U of `up`, bf16 `[inner, rank of up]`.
        down: TMA descriptor of V of `down`, bf16 `[width, inner]`.
        biases: `[inner]`, of `up`.
        y: bf16 `[tokens, width]`, contiguous, written.
        inner: number of inner activations.
        width: rank of `down`.
        UP, DOWN: numbers of panels of both ranks.
        PANELS: larger one of UP and DOWN.
        SLOTS: slots of the ring, of PANELS panels each.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    element: gl.constexpr = y.dtype.element_ty
    inputs = gl.allocate_shared_memory(element, [2 * UP, PANEL, PANEL], SHARED)
    ring = gl.allocate_shared_memory(element, [SLOTS * PANELS, PANEL, PANEL], SHARED)
    inputs_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(inputs_ready, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    first = gl.program_id(0) * TOKENS
    tiles = gl.cdiv(inner, PANEL)
    gl.warp_specialize(
        [
            (transform, (
                inputs, ring, inputs_ready, ready, free, biases, inner, tiles, y, first, tokens,
                width, 0, UP, DOWN, PANELS, SLOTS, num_warps,
            )),
            (transform, (
                inputs, ring, inputs_ready, ready, free, biases, inner, tiles, y, first, tokens,
                width, 1, UP, DOWN, PANELS, SLOTS, num_warps,
            )),
            (load_tiles, (
                x, up, down, first, tiles, inputs, ring, inputs_ready, ready, free,
                UP, DOWN, PANELS, SLOTS,
            )),
        ],
        [num_warps, 1],
        [240, 24],
    )  # fmt: skip
