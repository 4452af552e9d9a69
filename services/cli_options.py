"""Options that several commands of ``headrace`` share."""

from pathlib import Path
from typing import Annotated

import typer

from services.local.options import MAX_PORT

Port = Annotated[int, typer.Option(min=1, max=MAX_PORT, help="HTTP port of the gateway")]
GrpcPort = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_PORT, help="gRPC port of the gateway; default: --port + 1"),
]
RouterPort = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_PORT, help="HTTP port of the first router; default: --port + 2"),
]
AnyPort = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_PORT, help="HTTP port of a gateway; default: that of the running deployments"
    ),
]
Ranks = Annotated[
    int, typer.Option(min=1, max=64, help="ranks of each worker: GPUs, or processes on the CPU")
]
RanksOfRole = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="ranks of each worker of this role; default: --tp"),
]
RanksOfWorkers = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        max=64,
        help="ranks of the workers that will use the plan; give it several times for a plan that "
        "workers with different numbers share; default: 1",
    ),
]
Model = Annotated[
    str, typer.Option(help="smollm2-135m, or path of a GGUF file or checkpoint folder")
]
ModelOrNone = Annotated[
    str,
    typer.Option(
        help="smollm2-135m, or path of a GGUF file or checkpoint folder; none: only --encoder"
    ),
]
Encoder = Annotated[
    str | None,
    typer.Option(
        help="encoder for embeddings and scores: all-minilm-l6-v2, or path of a checkpoint folder; "
        "beside the model, or alone with --model none"
    ),
]
Device = Annotated[
    str, typer.Option(help="device to compute on: auto (a GPU if there is one), cpu or cuda")
]
Keep = Annotated[
    float | None,
    typer.Option(
        min=0.05, max=1.0, help="factorize linear layers and keep this fraction of their parameters"
    ),
]
Codec = Annotated[str, typer.Option(help="encoding of KV transfers: auto, raw or splitzip")]
KVFormat = Annotated[
    str, typer.Option(help="KV format: a built-in name, name:PATH of a calibration or module:Class")
]
KVEviction = Annotated[
    float, typer.Option(min=0, max=0.99, help="fraction of a prompt's tokens whose KV is evicted")
]
TlsDir = Annotated[
    Path | None,
    typer.Option(resolve_path=True, help="folder of tls.crt, tls.key, ca.crt, for mutual TLS"),
]
TokenizerSource = Annotated[
    str | None,
    typer.Option(help="model with the tokenizer, by name or path; default: the same model"),
]
