"""Start-up of an encoder worker: the encoder on its device, its identity, and warm-up."""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from runtime.encoder.model import Encoder, EncoderInput, load_encoder
from runtime.errors import RuntimeFault
from services.common.encoder_placement import Activation, EncoderModel, EncoderTask
from services.common.errors import SettingsError
from services.common.model_source import model_name, resolve_model
from services.encoder.settings import EncoderSettings
from services.tokenizer.encoder import EncoderTokenizer
from services.tokenizer.pieces import TokenizerError
from services.worker.device import torch_device

log = structlog.get_logger()

_CPU_BATCH_TOKENS = 512
_GPU_BATCH_TOKENS = 16_384
_QUEUED_BATCHES = 64


@dataclass(frozen=True)
class LoadedEncoder:
    """Result of the start-up.

    Attributes:
        epoch: 32 hex digits.
        model: what the worker registers.
        batch_tokens, max_queue_tokens: see `EncoderSettings`.
    """

    encoder: Encoder
    worker_id: str
    epoch: str
    model: EncoderModel
    batch_tokens: int
    max_queue_tokens: int


def load_worker(settings: EncoderSettings) -> LoadedEncoder:
    """Load the encoder and warm it up.

    Raises:
        SettingsError: the model cannot be served; the message says why.
    """
    path = resolve_model(settings.model)
    device = torch_device(settings.device)
    try:
        return _load(settings, path, device)
    except torch.OutOfMemoryError as error:
        raise SettingsError(f"not enough GPU memory for {settings.model}: {error}") from error
    except (RuntimeFault, ValueError, OSError) as error:
        raise SettingsError(f"cannot serve {settings.model}: {error}") from error


def _load(settings: EncoderSettings, path: Path, device: torch.device) -> LoadedEncoder:
    began = time.perf_counter()
    log.info("reading checkpoint", model=str(path))
    tokenizer = _tokenizer(path)
    encoder = load_encoder(
        path,
        device=device,
        dtype=_dtype(settings.dtype, device),
        max_tokens=settings.max_tokens or (tokenizer.trained_tokens if tokenizer else None),
        backend=settings.backend,
    )
    batch_tokens = settings.batch_tokens
    if batch_tokens == "auto":
        batch_tokens = _CPU_BATCH_TOKENS if device.type == "cpu" else _GPU_BATCH_TOKENS
    queue_tokens = settings.max_queue_tokens
    if queue_tokens == "auto":
        queue_tokens = _QUEUED_BATCHES * batch_tokens
    _warm_up(encoder, batch_tokens)
    log.info(
        "model loaded",
        model=str(path),
        seconds=round(time.perf_counter() - began, 2),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(encoder.dtype).removeprefix("torch."),
        task=encoder.task.value,
        dimension=encoder.dimension,
        max_tokens=encoder.max_tokens,
        backend=encoder.backend,
        batch_tokens=batch_tokens,
    )
    model = EncoderModel(
        name=settings.served_model_name or model_name(path),
        task=EncoderTask(encoder.task.value),
        dimension=encoder.dimension,
        max_tokens=encoder.max_tokens,
        vocab_size=encoder.config.vocab_size,
        activation=Activation(encoder.activation.value),
        model_hash=encoder.model_hash,
        tokenizer_hash=tokenizer.identity.hash if tokenizer else "",
    )
    return LoadedEncoder(
        encoder, settings.worker_id, uuid.uuid4().hex, model, batch_tokens, queue_tokens
    )


def _tokenizer(path: Path) -> EncoderTokenizer | None:
    """Return the tokenizer of the model's files; None if there is no usable one."""
    try:
        return EncoderTokenizer.load(path)
    except TokenizerError:
        return None


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16


def self_test_input(encoder_max_tokens: int, vocab_size: int) -> EncoderInput:
    """Return the fixed input that shows whether weights and device are sound."""
    return EncoderInput(
        tuple(token % vocab_size for token in range(1, 1 + min(8, encoder_max_tokens)))
    )


def _input_of(tokens: int, vocab_size: int) -> EncoderInput:
    return EncoderInput(tuple(token % vocab_size for token in range(tokens)))


def _warm_up(encoder: Encoder, batch_tokens: int) -> None:
    """Compute a short input and a full batch, which compiles kernels, and capture CUDA graphs.

    On a GPU, an input of the maximum length is computed as well if it is longer than a batch, so
    that a worker without enough memory for it does not start.

    Raises:
        ValueError: the output is not finite.
    """
    encoder.warm_up()
    vocab_size = encoder.config.vocab_size
    short = self_test_input(encoder.max_tokens, vocab_size)
    longest = min(encoder.max_tokens, batch_tokens)
    full = [_input_of(longest, vocab_size)] * (batch_tokens // longest)
    stages = {"one input": [short], "full batch": full}
    if encoder.device.type != "cpu" and encoder.max_tokens > batch_tokens:
        stages["longest input"] = [_input_of(encoder.max_tokens, vocab_size)]
    for name, inputs in stages.items():
        began = time.perf_counter()
        output = encoder.encode(inputs)
        if not bool(torch.isfinite(output).all()):
            raise ValueError(
                "the output for a test input is NaN or infinite: the weights or the device may be "
                "damaged"
            )
        ms = round(1e3 * (time.perf_counter() - began))
        log.info("warmed up", stage=name, size=sum(len(each.tokens) for each in inputs), ms=ms)
