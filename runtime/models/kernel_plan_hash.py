"""Everything that determines the results of a worker's kernels, and its hash.

Workers compare the hash in the handshake.
"""

import hashlib
import json

import torch

from runtime import kernels
from runtime.models.model import Model

KernelFacts = dict[str, str | int | bool | None]
"""Software, hardware and kernel choices, by name."""


def kernel_facts(model: Model) -> KernelFacts:
    """Return the software, hardware and kernel choices that determine a model's results.

    If it differs between workers, results may not be bitwise identical. The handshake compares
    weights and KV format separately.

    The number of ranks is not one of them, although it changes the order of sums: workers with
    different numbers of ranks exchange KV, as workers with different batches do. `Scheme.BASE` is
    (`Model.matmul`), because its layers have other kernels than those of other schemes and of one
    rank. The hash of a plan covers its scheme.
    """
    on_cpu = model.device.type == "cpu"
    return {
        "torch": torch.__version__.split("+")[0],
        "cuda": None if on_cpu else torch.version.cuda,
        "triton": None if on_cpu else _triton_version(),
        "kernels": kernels.VERSION,
        "device": model.device.type,
        "instructions": torch.backends.cpu.get_cpu_capability()
        if on_cpu
        else torch.cuda.get_device_name(model.device),
        "dtype": str(model.dtype),
        "matmul": model.matmul,
        "plan": model.plan_hash,
        "kv": model.kv_format.kernels,
        "factorized": model.factorized_layers > 0,
    }


def kernel_plan_hash(model: Model) -> str:
    """Return the hash of `kernel_facts`, 16 hex digits."""
    text = json.dumps(kernel_facts(model), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _triton_version() -> str:
    import triton  # only needed on a GPU

    return str(triton.__version__)
