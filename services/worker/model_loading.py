"""Reading of a worker's checkpoint, and preparation of its model for the device."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from runtime.checkpoint import Checkpoint, load_checkpoint
from runtime.gemm.model import build_fastest_model, unsupported_by_gemm
from runtime.megakernel.decode_step import unsupported_by_megakernel
from runtime.models.kernel_plan_hash import kernel_plan_hash
from runtime.models.model import Model
from runtime.pages.plan import PAGE_SIZE
from runtime.parallel.partition import Partition, Scheme
from services.common.errors import SettingsError
from services.worker.peers import NO_PEERS, Peers
from services.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from runtime.gemm.plan import KernelPlan

log = structlog.get_logger()


def load_model(
    path: Path, settings: WorkerSettings, device: str, peers: Peers = NO_PEERS
) -> tuple[Model, str]:
    """Return a rank's part of the model on its device, and the hash of the whole model.

    Layers are read one by one as the model packs them: safetensors are memory-mapped, and layers of
    GGUF files dequantized. Matrices move to the device one by one and are converted there, so the
    device holds at most one layer twice. The CUDA context is created while the checkpoint is
    hashed, which the first rank of a worker does for all. No tensor of the checkpoint stays in
    memory.
    """
    plan = _kernel_plan(settings.kernel_plan_file, device)
    dtype = _dtype(settings.dtype, device)
    started = time.perf_counter()
    log.info("reading checkpoint", model=str(path))
    checkpoint = _read(path, device, plan, peers)
    log.info("checkpoint read", seconds=_seconds_since(started))
    unsupported = unsupported_by_gemm(checkpoint, device, dtype)
    summed = checkpoint.partition is not None and checkpoint.partition.scheme is Scheme.BASE
    if plan is not None and unsupported is not None and not summed:
        raise _needs_gemm_backend(unsupported)
    model = build_fastest_model(
        checkpoint,
        device=device,
        dtype=dtype,
        page_size=PAGE_SIZE,
        plan=plan,
        kv_format=settings.kv_format,
        group=peers.join(torch.device(device)),
    )
    log.info(
        "model loaded",
        model=str(path),
        seconds=_seconds_since(started),
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        dtype=str(model.dtype).removeprefix("torch."),
        weight_bytes=model.weight_bytes,
        layers_dense=model.config.num_layers - model.factorized_layers,
        layers_factorized=model.factorized_layers,
        matmul=model.matmul,
        unsupported_by_gemm=unsupported,
        unsupported_by_megakernel=unsupported_by_megakernel(model),
        attention=model.kv_format.kernels,
        kernel_plan=kernel_plan_hash(model),
        plan_file=plan and plan.hash,
        plan_by_kernels=plan and sorted(name for name, tile in plan.choices.items() if tile),
        plan_multiplied_out=plan and sorted(plan.dense),
    )
    return model, checkpoint.model_hash


def _read(path: Path, device: str, plan: "KernelPlan | None", peers: Peers) -> Checkpoint:
    """Return a rank's part of the checkpoint; create the CUDA context meanwhile."""
    scheme = Scheme.LOW_RANK if plan is None else plan.scheme
    part = partial(Partition.of, rank=peers.rank, size=peers.size, scheme=scheme)
    with ThreadPoolExecutor(1) as pool:
        context = pool.submit(lambda: torch.zeros(1, device=device))
        checkpoint = load_checkpoint(
            path,
            dtype=None,
            part=part if peers.size > 1 else None,
            # A model of one rank is multiplied out when it is built.
            prepare=plan.multiply_out if plan and peers.size > 1 else lambda whole: whole,
            known=peers.known_files(),
        )
        if not checkpoint.has_lm_head:
            raise SettingsError(f"{path} has no LM head: serve it with `headrace up --encoder`")
        peers.share_files(checkpoint.hashed)
        context.result()
    return checkpoint


def _seconds_since(started: float) -> float:
    return round(time.perf_counter() - started, 2)


def _kernel_plan(path: Path | None, device: str) -> "KernelPlan | None":
    if path is None:
        return None
    from runtime.gemm.plan import KernelPlan

    if device == "cpu":
        raise _needs_gemm_backend("the device is cpu")
    plan = KernelPlan.load(path)
    if plan.device != torch.cuda.get_device_name(device):
        raise SettingsError(f"{path} is for {plan.device}: run `headrace tune` on this GPU")
    return plan


def _needs_gemm_backend(reason: str) -> SettingsError:
    return SettingsError(f"kernel_plan_file needs the GEMM backend: {reason}")


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device != "cpu" else torch.float32
    return torch.float32 if name == "float32" else torch.bfloat16
