"""Settings that prefill and decode workers share."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from runtime.parallel.partition import MAX_RANKS
from services.common.addresses import is_loopback
from services.transfer.network import TransferNetwork
from services.worker.process_settings import ProcessSettings

MAX_KV_TOKENS = 1 << 26


class WorkerSettings(ProcessSettings):
    """Settings of a worker that generates; `PrefillSettings` and `DecodeSettings` extend them.

    Attributes:
        gpu_batch: the default of ``max_running`` on a GPU.
        holds_prompts: whether the worker keeps prompts until other workers have read their KV.
    """

    gpu_batch: ClassVar[int] = 64
    holds_prompts: ClassVar[bool] = False

    @property
    def exchanges_history(self) -> bool:
        """Whether the worker sends or reads KV of history, see `services.prefill.history`."""
        return True

    @property
    def computes_prompts(self) -> bool:
        """Whether the worker computes prompts regularly, not only after preemption."""
        return True

    transfer_interface: str | None = Field(
        None,
        pattern=r"^[^\s,/]{1,15}$",
        description="network interface of KV transfers over TCP, such as eth0; RDMA devices are "
        "used as well; default: lo if `host` is a loopback address, else all interfaces; the "
        "environment variable UCX_NET_DEVICES overrides it",
    )
    transfer_ports: str | None = Field(
        None,
        description="range of TCP ports on which KV transfers listen, low-high, one port for each "
        "interface, worker and rank; default: ephemeral ports; the environment variable "
        "UCX_TCP_PORT_RANGE overrides it",
    )
    model: str = Field("smollm2-135m", description="name or path of a checkpoint")
    tp: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="number of ranks of this worker, which compute every step together (tensor "
        "parallelism): one process for each, on a GPU of its own or all on the CPU",
    )
    rank_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="with several ranks, time without progress of one of them after which the "
        "worker ends, seconds; must be longer than any step; on the CPU, time "
        "in which a step uses the processor does not count",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="dtype of weights and activations; auto: float32 on the CPU, bfloat16 on a GPU",
    )
    kv_format: str = Field(
        "dense",
        pattern=r"^\S(.{0,1022}\S)?$",
        description="KV format: a built-in one, name:PATH with a calibration from `headrace "
        "calibrate`, or module:Class; the same for all workers",
    )
    kv_eviction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of a prompt's tokens whose KV is evicted once the prompt is complete "
        "(Keyformer), for prompts of at least 128 tokens; 0: none; the same for all workers",
    )
    prefix_cache: bool = Field(
        True,
        description="keep the KV of prompts and outputs in free pages, so that later prompts that "
        "start with the same tokens need not compute or transfer it again",
    )
    kernel_plan_file: Path | None = Field(
        None,
        description="kernel plan from `headrace tune` for this model and GPU, the same file for "
        "all workers; default: kernels are chosen by built-in rules",
    )
    decode_graphs: Literal["step", "layer"] = Field(
        "step",
        description="on a GPU, one CUDA graph for a whole decode step, or one for each layer, "
        "which is slower and meant for comparison",
    )
    kv_tokens: Annotated[int, Field(ge=16, le=MAX_KV_TOKENS)] | Literal["auto"] = Field(
        "auto",
        description="size of the KV page pool in tokens, rounded down to a multiple of 16; pages "
        "for windows of sequences and for prompts are added with a compressed format; auto: on a "
        "GPU as many as `gpu_memory_utilization` allows, 16,384 on the CPU",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="fraction of the GPU's memory that this worker may use in total, if "
        "`kv_tokens` is auto; the fractions of workers on one GPU must add up to at most 1",
    )
    max_running: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        "auto",
        description="maximum number of sequences in one batch; auto: 256 for a decode worker on a "
        "GPU, otherwise 64",
    )
    max_waiting: int = Field(
        256, ge=1, le=65536, description="maximum number of waiting sequences; more are refused"
    )
    step_tokens: Annotated[int, Field(ge=16, le=1 << 20)] | Literal["auto"] = Field(
        "auto",
        description="maximum tokens of a step, those of running sequences included; auto: 1,024 "
        "on a GPU, otherwise 512",
    )
    chunk_tokens: Annotated[int, Field(ge=16, le=1 << 20)] | Literal["auto"] = Field(
        "auto",
        description="maximum prompt tokens of one sequence in a step, a multiple of 16; auto: "
        "`step_tokens`, at most 1,024; workers with different values do not serve a request "
        "together, because a prompt computed again in other chunks may be rounded differently",
    )
    cached_grammars: int = Field(
        256,
        ge=1,
        le=1 << 16,
        description="maximum number of compiled grammars that are kept for further requests with "
        "the same `response_format` or `structured_outputs`, at most a quarter of them for one "
        "tenant or cache salt; each takes about 100 KiB",
    )
    codec: Literal["auto", "raw", "splitzip"] = Field(
        "auto",
        description="encoding of the KV that this worker sends; auto: on each link the one "
        "measured to be faster, or raw without codebooks",
    )
    codebooks: Path | None = Field(
        None,
        description="file of calibrated codebooks, the same for all workers; required by codec "
        "splitzip",
    )
    kv_digest: bool = Field(False, description="log a digest of each sequence's pages, for tests")
    slots: int = Field(
        16,
        ge=1,
        le=65536,
        description="number of slots in this worker's slab; a quarter of this number, at least 2, "
        "is added for history that prefill workers read from decode workers",
    )
    slot_bytes: Annotated[int, Field(ge=1 << 14, le=1 << 30, multiple_of=16)] | Literal["auto"] = (
        Field(
            "auto",
            description="bytes of a slot, the maximum size of an encoded segment; auto: 4 MiB on "
            "the CPU, 256 MiB of KV on a GPU, less if `slots` of them used over 3 % of its memory",
        )
    )

    @field_validator("transfer_ports")
    @classmethod
    def _check_port_range(cls, ports: str | None) -> str | None:
        low, _, high = (ports or "1-1").partition("-")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 65535):
            raise ValueError(f"{ports} is not a range of ports such as 21000-21015")
        return ports

    @property
    def transfer_network(self) -> TransferNetwork:
        """Network devices and ports of KV transfers."""
        return TransferNetwork(is_loopback(self.host), self.transfer_interface, self.transfer_ports)
