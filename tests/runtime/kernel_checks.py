"""The runtime's Triton kernels against torch, on `DEVICE`. `test_kernels.py` runs these.

Each check is a plain test function; with `TRITON_INTERPRET=1` they run on CPU tensors.
"""

from dataclasses import replace
from math import nan

import pytest
import torch

from runtime.attention import gpu
from runtime.attention.base import Batch, SequenceSlice
from runtime.attention.gpu import TritonAttention
from runtime.attention.reference import ReferenceAttention
from runtime.checkpoint import Checkpoint
from runtime.gemm.epilogues import Kind
from runtime.gemm.ops import Norm, Products
from runtime.gemm.plan import KernelPlan, LargeTile, Tile
from runtime.gemm.weights import LINE, Matrix, StepWeights, up
from runtime.layers.rope import cos_sin_table
from runtime.megakernel.launch import DecodeStep
from runtime.models.model import Model
from tests.runtime.attention.samples import batch_of, pages_of, random_pages
from tests.runtime.tiny import CONFIG, tiny_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = replace(
    CONFIG, hidden_size=1040, intermediate_size=4200, num_heads=16, num_kv_heads=1, head_dim=128,
    context_length=3072,
)  # fmt: skip
SHAPES = [(6, 2, 16), (9, 3, 64), (4, 4, 96), (8, 1, 128), (5, 5, 20)]
CASES = [
    # shape, lengths, new tokens of each, queries
    ((6, 2, 16), [1], 1, torch.float32),
    ((6, 2, 16), [63, 1, 100], 1, torch.bfloat16),
    ((9, 3, 64), [15, 17], 1, torch.float32),
    ((4, 4, 96), [16, 32, 200], 1, torch.float32),
    ((8, 1, 128), [63, 1, 100], 1, torch.bfloat16),
    ((5, 5, 20), [15, 17], 1, torch.float32),
    ((6, 2, 16), [1], 7, torch.float32),
    ((9, 3, 64), [63, 1, 100], 7, torch.bfloat16),
    ((4, 4, 96), [15, 17], 40, torch.float32),
    ((8, 1, 128), [16, 32, 100], 40, torch.float32),
    ((5, 5, 20), [63, 1, 100], 40, torch.bfloat16),
    ((4, 2, 64), [300], 290, torch.float32),
    ((4, 2, 64), [128, 256, 64], 256, torch.bfloat16),
]


def random(*shape: int, seed: int = 4) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("shape", "lengths", "new", "dtype"), CASES)
def test_attend_is_the_reference_and_reads_no_stale_slot(
    shape: tuple[int, int, int], lengths: list[int], new: int, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    batch = batch_of(lengths, new, DEVICE)
    k, v = random_pages(lengths, kv_heads, dim, DEVICE)
    q = random(len(batch.tokens), heads, dim).to(dtype)
    expected = ReferenceAttention().attend(q, k, v, batch)
    attention = TritonAttention(heads, kv_heads, dim)
    got = attention.attend(q, k, v, batch)
    # Weights are rounded to bf16 before they meet the values.
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    again = attention.attend(q, k, v, batch)  # what programs left behind must not matter
    assert torch.equal(got, again)


@pytest.mark.parametrize(
    ("shape", "lengths", "new"), [((4, 2, 64), [300, 20], 20), ((2, 1, 128), [300], 290)]
)
def test_enough_programs_have_larger_blocks(
    shape: tuple[int, int, int],
    lengths: list[int],
    new: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "_FILLED", 0)
    assert TritonAttention(*shape)._queries(new) == (128, 8)
    test_attend_is_the_reference_and_reads_no_stale_slot(shape, lengths, new, torch.bfloat16)


def test_programs_that_are_alone_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of sequences: nothing of it is kept."""
    monkeypatch.setattr(gpu, "_PROGRAMS", 1)
    attention = TritonAttention(4, 2, 16)
    for lengths in ([20], [5, 33], [70, 1, 2]):
        batch = batch_of(lengths, 1, DEVICE)
        k, v = random_pages(lengths, 2, 16, DEVICE)
        q = random(len(lengths), 4, 16)
        expected = ReferenceAttention().attend(q, k, v, batch)
        got = attention.attend(q, k, v, batch)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert list(attention._spaces) == [(0, 1)]
    assert not attention._spaces[0, 1].sums.numel()


@pytest.mark.parametrize("sequences", [1, 3])
def test_lengths_may_change_under_the_same_launch(sequences: int) -> None:
    """What a CUDA graph does: the same tensors with other numbers in them."""
    heads, kv_heads, dim = 6, 2, 32
    attention, reference = TritonAttention(heads, kv_heads, dim), ReferenceAttention()
    assert attention.splits(sequences) > 1
    for longest in (300, 64, 65, 1):
        lengths = [max(1, longest - 13 * number) for number in range(sequences)]
        batch = batch_of(lengths, 1, DEVICE)
        k, v = random_pages(lengths, kv_heads, dim, DEVICE)
        q = random(sequences, heads, dim)
        got, expected = (a.attend(q, k, v, batch) for a in (attention, reference))
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new", [1, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_is_the_reference(shape: tuple[int, int, int], new: int, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    lengths = [63, 1, 100]
    batch = batch_of(lengths, new, DEVICE)
    qkv = random(len(batch.tokens), (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(100, dim // 2, generator=torch.Generator().manual_seed(6)) * 6
    rope = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    found = []
    for attention in (ReferenceAttention(), TritonAttention(heads, kv_heads, dim)):
        k, v = random_pages(lengths, kv_heads, dim, DEVICE)
        found.append((attention.write(qkv, rope, k, v, batch), k, v))
    for expected, got in zip(*found, strict=True):
        # A product and a sum in one instruction round once less.
        torch.testing.assert_close(
            got.float(), expected.float(), rtol=8e-3, atol=1e-5, equal_nan=True
        )
        assert torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("kind", "shapes", "tokens", "tile"),
    [
        (Kind.PLAIN, [(48, 40)], 5, Tile(16, 16, 16, 1, 4, 2)),
        (Kind.PLAIN, [(48, 32), (17, 8), (33, 24)], 37, Tile(16, 16, 16, 1, 4, 2)),
        (Kind.PLAIN, [(48, 32), (17, 8), (33, 24)], 37, Tile(16, 16, 16, 3, 4, 3)),
        (Kind.RESIDUAL, [(48, 40)], 70, Tile(16, 32, 16, 2, 4, 2)),
        (Kind.GATED, [(40, 32), (40, 24)], 70, Tile(32, 32, 16, 1, 4, 2)),
        (Kind.GATED, [(40, 32), (40, 24)], 1, Tile(64, 32, 32, 1, 4, 2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_the_kernel_are_torchs(
    kind: Kind, shapes: list[tuple[int, int]], tokens: int, tile: Tile, bias: bool
) -> None:
    """Ranks that no block divides, twice over the same counters."""
    check_products(kind, shapes, tokens, tile, bias)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize(
    "tile", [LargeTile(2, 256), LargeTile(2, 128), LargeTile(1, 128), LargeTile(2, 64)], ids=str
)
@pytest.mark.parametrize(
    ("kind", "shapes", "splits"),
    [
        (Kind.PLAIN, [(304, 1000)], 1),
        (Kind.PLAIN, [(304, 72), (200, 64), (96, 200)], 1),
        (Kind.PLAIN, [(304, 1000), (8, 520)], 3),
        (Kind.RESIDUAL, [(520, 264)], 1),
        (Kind.GATED, [(200, 152), (200, 72)], 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_the_large_kernel_are_torchs(
    kind: Kind, shapes: list[tuple[int, int]], splits: int, tile: LargeTile, bias: bool
) -> None:
    """A few tokens, and more than a program has at a time."""
    for tokens in (1, 77, 2500):
        check_products(kind, shapes, tokens, replace(tile, splits=splits), bias)


def check_products(
    kind: Kind, shapes: list[tuple[int, int]], tokens: int, tile: Tile | LargeTile, bias: bool
) -> None:
    """Against torch's, twice over the same counters. Between rows of weights is what must not be
    read."""
    numbers = sum(rows * up(width, LINE) for rows, width in shapes)
    base = aligned(torch.full((numbers + LINE,), nan, dtype=torch.bfloat16, device=DEVICE))
    matrices, at, first = [], 0, 0
    for rows, width in shapes:
        stride = up(width, LINE)
        weight = base[at : at + rows * stride].view(rows, stride)[:, :width]
        weight.copy_(random(rows, width, seed=first))
        matrices.append(Matrix(weight, first=first))
        at, first = at + rows * stride, first + width
    x = random(tokens, first, seed=5).bfloat16()
    biases = random(sum(rows for rows, _ in shapes), seed=6) if bias else None
    products = Products(base, matrices, KernelPlan(), kind, biases)
    hidden = None
    if kind is Kind.RESIDUAL:
        hidden = random(tokens, shapes[0][0], seed=7).bfloat16()
    expected = expected_of(matrices, kind, x, biases, hidden)
    for _ in range(2):
        got = products.by_kernel(x, None if hidden is None else hidden.clone(), tile)
        torch.testing.assert_close(
            got.float(), expected, rtol=1e-2, atol=5e-3 * float(expected.std())
        )


def expected_of(
    matrices: list[Matrix],
    kind: Kind,
    x: torch.Tensor,
    biases: torch.Tensor | None,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """In fp32, nothing of which is rounded."""
    parts = []
    for matrix in matrices:
        rows, width = matrix.weight.shape
        parts.append(x[:, matrix.first : matrix.first + width].float() @ matrix.weight.float().t())
        if biases is not None:
            parts[-1] += biases[:rows]
            biases = biases[rows:]
    if kind is Kind.GATED:
        return torch.nn.functional.silu(parts[0]) * parts[1]
    return torch.cat(parts, 1) + (0.0 if hidden is None else hidden.float())


def aligned(numbers: torch.Tensor) -> torch.Tensor:
    """The same from a multiple of 128 bytes on."""
    return numbers[-numbers.data_ptr() % 128 // numbers.itemsize :]


@pytest.mark.parametrize("width", [48, 1000])
def test_norm_is_torchs(width: int) -> None:
    x, weight = random(7, width).bfloat16(), random(width, seed=5)
    expected = torch.nn.functional.rms_norm(x.float(), (width,), weight, 1e-5)
    torch.testing.assert_close(Norm(weight, 1e-5)(x).float(), expected, rtol=8e-3, atol=1e-5)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize(
    ("ranks", "bias"),
    [
        ((None,) * 7, True),
        ((9, 5, 8, 12, 17, 11, 24), True),
        ((9, None, 8, None, 17, None, 24), False),
    ],
)
@pytest.mark.parametrize("tall", [0, 48])
@pytest.mark.parametrize(
    "positions", [(0,), (37, 16), (130, 1, 63), (300, 17, 128, 129, 5, 0, 64, 16)]
)
def test_a_step_is_the_models(
    ranks: tuple[int | None, ...], bias: bool, positions: tuple[int, ...], tall: int
) -> None:
    """Logits, and K and V in the pages, of dense, factorized and mixed layers."""
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    check_step(tiny_checkpoint(ranks=ranks, bias=bias), positions, programs, tall)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("ranks", [(None,) * 7, (300, 100, 90, 200, 1100, 1060, 1500)])
@pytest.mark.parametrize("tall", [0, 1 << 20])
@pytest.mark.parametrize(("programs", "positions"), [(3, (3000, 0)), (2, (400,)), (40, (3000,))])
def test_a_large_step_of_few_programs_is_the_models(
    ranks: tuple[int | None, ...], programs: int, positions: tuple[int, ...], tall: int
) -> None:
    """Many tiles and blocks of rows for each program, inputs in several parts, sixteen heads for
    one of K and V, KV in one part and in many."""
    check_step(tiny_checkpoint(ranks=ranks, config=LARGE), positions, programs, tall)


def check_step(
    checkpoint: Checkpoint, positions: tuple[int, ...], programs: int, tall: int
) -> None:
    """A step's logits, and K and V in the pages, against the model's, three times over."""
    config = checkpoint.config
    model = Model(checkpoint, device=DEVICE, dtype=torch.float32)
    pages = pages_of([position + 1 for position in positions])
    cache = model.new_cache(sum(map(len, pages)) + 1)
    texts = [
        [(7 * number + 3 * at) % config.vocab_size for at in range(position + 1)]
        for number, position in enumerate(positions)
    ]
    before = [
        SequenceSlice(text[:-1], 0, own, want_logits=False)
        for text, own in zip(texts, pages, strict=True)
        if len(text) > 1
    ]
    if before:
        model.forward(Batch.of(before, DEVICE), cache)
    rope = cos_sin_table(config, config.context_length)
    step = DecodeStep(
        StepWeights.of(checkpoint, DEVICE),
        cache.planes,
        (rope[0].to(DEVICE), rope[1].to(DEVICE)),
        Batch.static(len(positions), max(map(len, pages)), DEVICE),
        programs=programs,
        tall=tall,
    )
    step.batch.tokens.copy_(torch.tensor([text[-1] for text in texts]))
    step.batch.positions.copy_(torch.tensor(positions))
    step.batch.lengths.copy_(torch.tensor(positions) + 1)
    for row, own in enumerate(pages):
        step.batch.page_table[row, : len(own)] = torch.tensor(own)
    written = []
    for _ in range(3):
        step.launch()
        written.append((step.logits.clone(), [plane.clone() for plane in cache.planes]))
    last = [
        SequenceSlice(text[-1:], len(text) - 1, own) for text, own in zip(texts, pages, strict=True)
    ]
    expected = model.forward(Batch.of(last, DEVICE), cache)
    for logits, planes in written:
        # Weights are bf16 here and fp32 there.
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=0.01 * float(expected.abs().max())
        )
        for plane, other in zip(planes, cache.planes, strict=True):
            torch.testing.assert_close(plane, other, rtol=0, atol=0.04)


@pytest.mark.parametrize("ranks", [(None,) * 7, (9, 5, 8, 12, 17, 11, 24), (9, None) * 3 + (24,)])
@pytest.mark.parametrize(("bias", "plan"), [(True, None), (False, KernelPlan(forced=True))])
def test_a_stepped_model_is_the_model(
    ranks: tuple[int | None, ...], bias: bool, plan: KernelPlan | None
) -> None:
    """Prefill in two parts, then a token of each sequence: the order of rows of heads, padded
    ranks, and steps over tensors that stay; by the best there is, and all by our kernels."""
    checkpoint = tiny_checkpoint(ranks=ranks, bias=bias)
    count, length = (3, 150) if DEVICE.type == "cuda" else (2, 22)  # the interpreter takes long
    texts = [
        [(7 * number + 3 * at) % CONFIG.vocab_size for at in range(length)]
        for number in range(count)
    ]
    pages = pages_of([len(text) for text in texts])
    found = []
    for stepped in (False, True):
        model = Model(checkpoint, device=DEVICE, dtype=torch.float32, stepped=stepped, plan=plan)
        cache = model.new_cache(32)
        logits = []
        for first, last in ((0, 16), (16, length - 1)):
            slices = [
                SequenceSlice(text[first:last], first, own)
                for text, own in zip(texts, pages, strict=True)
            ]
            logits.append(model.forward(Batch.of(slices, DEVICE), cache))
        last_ones = [
            SequenceSlice(text[-1:], length - 1, own)
            for text, own in zip(texts, pages, strict=True)
        ]
        step = model.static_step(Batch.of(last_ones, DEVICE), cache)
        logits += [step().clone(), step().clone()]
        assert torch.equal(logits[2], logits[3])
        found.append(torch.cat(logits))
    expected, got = found
    # bf16 throughout, and fp32.
    torch.testing.assert_close(got, expected, rtol=0, atol=0.04 * float(expected.abs().max()))
