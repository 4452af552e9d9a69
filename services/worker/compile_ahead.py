"""Compile the kernels of a worker in parallel, before its warm-up launches one after another.

With an empty cache, most of a start is compilation, and Triton compiles a kernel only when it is
launched, on one core. `compile_ahead` therefore goes through the worker's passes and codec calls
while launches are skipped (`runtime.kernels.launches`), over a temporary cache of a few pages. This
finds the kernels of exactly this worker: with its weights and their addresses, plan, sizes and
codebooks. A pool of processes compiles them into Triton's cache on disk, from which the warm-up
loads them.

A file in Triton's cache records that this has been done for such a worker, so that later starts
skip it. If the record is wrong or compilation fails, the warm-up compiles what is missing.
"""

import gc
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

import codec
import runtime
from runtime.core.limits import Limits
from runtime.kv.pages import pages_for
from runtime.models.model import Model
from services.transfer.codecs import Books, SegmentCodecs
from services.worker.segment_kinds import kinds_of_segments, wire_modes
from services.worker.settings import WorkerSettings
from services.worker.sizes import WorkerSizes

log = structlog.get_logger()

_PROGRESS_S = 1.0
"""Minimum time between two records of progress."""


def compile_ahead(
    model: Model, settings: WorkerSettings, sizes: WorkerSizes, books: Books, *, decodes: bool
) -> None:
    """Compile the kernels that the worker's warm-up launches, unless this has been done before.

    Does nothing on a CPU, and for models whose steps are not replayed. A failure is logged.
    """
    if not model.replayable:
        return
    started = time.perf_counter()
    try:
        record = _record(model, settings, sizes, books, decodes=decodes)
        if record.exists():
            return
        _compile(lambda: _launch_all(model, settings, sizes, books, decodes=decodes), record)
        log.info("compiled ahead", seconds=round(time.perf_counter() - started, 2))
    except Exception as error:  # noqa: BLE001 - the warm-up compiles what is missing
        log.warning("kernels are not compiled in parallel", reason=repr(error)[:300])
    gc.collect()  # the temporary cache must be free before the memory is measured
    torch.cuda.empty_cache()


def _compile(launch_all: Callable[[], None], record: Path) -> None:
    """Compile all kernels that a function launches, and write the record if none failed."""
    from runtime.kernels.compile_pool import CompilePool, PoolStatus
    from runtime.kernels.launches import launches_skipped

    reported = 0.0

    def report(status: PoolStatus) -> None:
        nonlocal reported
        now = time.perf_counter()
        if now - reported >= _PROGRESS_S or status.done == status.submitted:
            reported = now
            log.info("compiling", done=status.done, kernels=status.submitted)

    with CompilePool() as pool:
        with launches_skipped(pool.submit):
            launch_all()
        status = pool.wait(report)
    if status.errors or status.done < status.submitted:
        missing = status.submitted - status.done + len(status.errors)
        log.warning("kernels left to the warm-up", kernels=missing, errors=status.errors[:3])
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()


@torch.inference_mode()
def _launch_all(
    model: Model, settings: WorkerSettings, sizes: WorkerSizes, books: Books, *, decodes: bool
) -> None:
    """Launch all kernels of the worker's passes and codec calls, over a temporary cache."""
    from runtime.replay.step import StepReplay

    cache = model.new_cache(pages_for(sizes.chunk_tokens, model.page_size) + 1)
    limits = Limits(sizes.max_running, 1, sizes.step_tokens, sizes.chunk_tokens)
    by_layer = settings.decode_graphs == "layer"
    steps = StepReplay(model, cache, limits, decodes=decodes, by_layer=by_layer, captures=False)
    steps.launch_passes()
    codecs = SegmentCodecs(model.layout, books)
    for plan in kinds_of_segments(model.layout, codecs, sizes.chunk_tokens, sizes.slot_bytes):
        for mode in wire_modes(codecs):
            codecs.of(cache.planes, plan.extent, mode).launch(plan.extent.num_tokens)


def _record(
    model: Model, settings: WorkerSettings, sizes: WorkerSizes, books: Books, *, decodes: bool
) -> Path:
    """Return the file that records that the kernels of such a worker are compiled.

    Its name depends on everything that selects kernels: the code of the kernels and of what
    launches them, versions, device, the shapes of the model and its plan, sizes and codebooks.
    """
    from triton import knobs

    digest = hashlib.sha256()
    for package in (runtime, codec):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(source.read_bytes())
    parts = [
        model.kernel_plan_hash,
        model.config,
        [gemm.shapes for gemm in model.grouped_gemms()],
        sorted(books.items()),
        sizes,
        settings.decode_graphs,
        decodes,
    ]
    digest.update(repr(parts).encode())
    return Path(knobs.cache.dir) / f"headrace-{digest.hexdigest()[:32]}.compiled"
