"""Compression one layer at a time: equal to the whole model at once, resumable, on any device."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from runtime.checkpoint.assemble import named_tensors
from runtime.checkpoint.weights import FactorPair, linears_of, moved
from runtime.errors import CompressionError
from runtime.offline.compress import Method, WorkFolder, artifact_key, compress, perplexity
from runtime.offline.compress.forward import forward
from runtime.offline.compress.layerwise import LayerwiseModel
from runtime.offline.compress.moments import backward_moments, forward_moments
from tests.runtime.offline.compress.reference import whole_model_factors, whole_model_moments
from tests.runtime.tiny import CONFIG, tiny_checkpoint

DENSE = tiny_checkpoint(bias=True, head_norms=True, config=replace(CONFIG, num_layers=4))
# A small final norm keeps predictions uncertain; certain predictions have no gradient.
MODEL = replace(DENSE, final_norm=0.2 * DENSE.final_norm, model_hash="e" * 64)
TOKENS = torch.randint(0, CONFIG.vocab_size, (6, 40), generator=torch.Generator().manual_seed(6))
METHODS = [Method.FISHER, Method.SVD_LLM]


def test_moments_equal_those_of_the_whole_model() -> None:
    expected = whole_model_moments(MODEL, TOKENS, seed=3)
    layers = backward_moments(LayerwiseModel(MODEL), TOKENS, range(4), seed=3)
    inputs = forward_moments(LayerwiseModel(MODEL), TOKENS, [range(0, 3), range(3, 4)])
    from_inputs = [moment for block in inputs for moment in block.moments]
    for layer, from_input, whole in zip(list(layers)[::-1], from_inputs, expected, strict=True):
        (from_gradients,) = layer.moments
        # The operations are the same, and added in the same order up to rounding in fp32.
        torch.testing.assert_close(from_gradients.inputs, whole.inputs)
        torch.testing.assert_close(from_gradients.gradients, whole.gradients)
        torch.testing.assert_close(from_input.inputs, whole.inputs)
        assert not from_input.gradients


@pytest.mark.parametrize("method", METHODS)
def test_factors_equal_those_of_the_whole_model(method: Method) -> None:
    made, _ = compress(MODEL, TOKENS, 0.6, rank_multiple=2, method=method)
    expected = whole_model_factors(MODEL, TOKENS, 0.6, method, multiple=2)
    pairs = 0
    for layer, reference in zip(made.layers, expected, strict=True):
        for field, linear in linears_of(layer):
            pair = reference[field]
            if pair is None:
                assert not isinstance(linear, FactorPair)
                continue
            assert isinstance(linear, FactorPair)
            assert linear.rank == pair.rank
            # Factors are rounded to bf16, and their columns have a sign that is arbitrary.
            product = pair.u @ pair.v
            scale = float(product.abs().max())
            torch.testing.assert_close(linear.u @ linear.v, product, rtol=0, atol=0.01 * scale)
            pairs += 1
    assert pairs > 10


class Interrupted(Exception):
    pass


def interrupted_after(blocks: int, folder: Path, method: Method) -> None:
    """Compress until ``blocks`` blocks are finished, then stop as Ctrl-C would."""

    def stop(stage: str, _: float) -> None:
        nonlocal blocks
        blocks -= stage == "factorizing"
        if blocks == 0:
            raise Interrupted

    work = WorkFolder(folder, key(method))
    with pytest.raises(Interrupted):
        compress(MODEL, TOKENS, 0.6, stop, 2, method=method, work=work)
    work.close()


def key(method: Method) -> str:
    return artifact_key(MODEL.model_hash, 0.6, TOKENS, method)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("blocks", [1, 2])
def test_interrupted_compression_continues_where_it_stopped(
    method: Method, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = compress(MODEL, TOKENS, 0.6, rank_multiple=2, method=method)
    interrupted_after(blocks, tmp_path / "work", method)
    (tmp_path / "work" / "layers-00001.draft").write_bytes(b"half a file")

    computed: list[int] = []
    layer = LayerwiseModel.layer

    def record(model: LayerwiseModel, index: int) -> object:
        computed.append(index)
        return layer(model, index)

    monkeypatch.setattr(LayerwiseModel, "layer", record)
    with WorkFolder(tmp_path / "work", key(method)) as work:
        made, _ = compress(MODEL, TOKENS, 0.6, rank_multiple=2, method=method, work=work)
        assert made.model_hash == expected.model_hash
        finished = blocks * len(method.blocks(4)[0])
        last = method.uses_gradients  # it starts with the last layer
        assert set(computed) == set(range(4 - finished) if last else range(finished, 4))
        computed.clear()
        again, _ = compress(MODEL, TOKENS, 0.6, rank_multiple=2, method=method, work=work)
        assert again.model_hash == expected.model_hash
        assert not computed
        work.remove()
    assert not (tmp_path / "work").exists()
    assert bool(forward(made, TOKENS[:1]).isfinite().all())


def test_changed_options_start_again(tmp_path: Path) -> None:
    interrupted_after(2, tmp_path / "work", Method.FISHER)
    (tmp_path / "work" / "notes.txt").write_text("mine")
    with WorkFolder(tmp_path / "work", key(Method.FISHER)) as work:
        assert work.finished() == [2, 3]
    changed = artifact_key(MODEL.model_hash, 0.7, TOKENS)
    with WorkFolder(tmp_path / "work", changed) as work:
        assert work.finished() == []
        names = {path.name for path in (tmp_path / "work").iterdir()}
        assert names == {"lock", "state.json", "notes.txt"}
        assert json.loads((tmp_path / "work" / "state.json").read_text()) == {"key": changed}
        work.remove()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["notes.txt"]


def test_work_folder_is_used_by_one_process(tmp_path: Path) -> None:
    with (
        WorkFolder(tmp_path / "work", "a"),
        pytest.raises(CompressionError, match="another process"),
    ):
        WorkFolder(tmp_path / "work", "a")
    WorkFolder(tmp_path / "work", "a").close()


def test_damaged_work_folder_is_reported(tmp_path: Path) -> None:
    interrupted_after(1, tmp_path / "work", Method.SVD_LLM)
    (tmp_path / "work" / "layers-00000.safetensors").write_bytes(b"short")
    with (
        WorkFolder(tmp_path / "work", key(Method.SVD_LLM)) as work,
        pytest.raises(CompressionError, match="is damaged"),
    ):
        compress(MODEL, TOKENS, 0.6, method=Method.SVD_LLM, work=work)


def converted(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    names = ("embedding", "final_norm", "lm_head")
    tensors = {name: getattr(checkpoint, name).to(dtype) for name in names}
    layers = tuple(moved(layer, torch.device("cpu"), dtype, {}) for layer in checkpoint.layers)
    return replace(checkpoint, layers=layers, **tensors)


def test_bf16_checkpoint_gives_the_factors_of_its_fp32_values(tmp_path: Path) -> None:
    write_checkpoint(converted(MODEL, torch.bfloat16), tmp_path / "dense")
    mapped = load_checkpoint(tmp_path / "dense", dtype=None)
    wide = load_checkpoint(tmp_path / "dense")
    made, _ = compress(mapped, TOKENS, 0.6, rank_multiple=2)
    expected, _ = compress(wide, TOKENS, 0.6, rank_multiple=2)
    assert {tensor.dtype for _, tensor in named_tensors(made)} == {torch.bfloat16}
    assert torch.equal(
        forward(converted(made, torch.float32), TOKENS[:2]), forward(expected, TOKENS[:2])
    )
    assert perplexity(made, TOKENS) == perplexity(expected, TOKENS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", list(Method))
def test_gpu_gives_the_factors_of_the_cpu(method: Method) -> None:
    expected, _ = compress(MODEL, TOKENS, 0.6, rank_multiple=2, method=method)
    made, report = compress(MODEL, TOKENS, 0.6, rank_multiple=2, method=method, device="cuda")
    assert report.peak_device_bytes > 0
    for layer, reference in zip(made.layers, expected.layers, strict=True):
        for (_, ours), (_, theirs) in zip(linears_of(layer), linears_of(reference), strict=True):
            assert isinstance(ours, FactorPair) == isinstance(theirs, FactorPair)
            if isinstance(ours, FactorPair) and isinstance(theirs, FactorPair):
                assert ours.rank == theirs.rank
                product = theirs.u @ theirs.v
                scale = float(product.abs().max())
                torch.testing.assert_close(ours.u @ ours.v, product, rtol=0, atol=0.01 * scale)
    assert perplexity(made, TOKENS, device="cuda") == pytest.approx(
        perplexity(expected, TOKENS), rel=1e-2
    )
