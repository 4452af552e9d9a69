"""The ``headrace`` command. Commands import their modules lazily, to keep ``--help`` fast."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
import yaml

from services.common.errors import SettingsError
from services.common.file_limit import raise_file_limit
from services.common.logging import configure_logging
from services.common.settings import ServiceSettings
from services.local.options import UpOptions
from services.local.supervisor import EXIT_SETTINGS_ERROR
from services.offline import calibrate_flags as flags

app = typer.Typer(
    help="Disaggregated prefill/decode serving with a lossless compressed KV transfer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SERVICES = {
    "gateway": "GatewaySettings",
    "router": "RouterSettings",
    "prefill": "PrefillSettings",
    "decode": "DecodeSettings",
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Port = Annotated[int, typer.Option(help="HTTP port of the gateway of the deployment")]
Model = Annotated[
    str, typer.Option(help="smollm2-135m, or path of a GGUF file or checkpoint folder")
]
Device = Annotated[
    str, typer.Option(help="device of the computation: auto (a GPU if there is one), cpu or cuda")
]
KVFormat = Annotated[
    str, typer.Option(help="KV format: a built-in name, name:PATH of a calibration or module:Class")
]
TokenizerSource = Annotated[
    str | None,
    typer.Option(help="model with the tokenizer, by name or path; default: the same model"),
]


def _load(service: str, arguments: list[str]) -> ServiceSettings:
    settings_class: type[ServiceSettings] = getattr(
        import_module(f"services.{service}.settings"), SERVICES[service]
    )
    return settings_class.load(arguments, program=f"headrace {service}")


def _run_service(service: str, arguments: list[str]) -> None:
    """Run a service until a signal ends it. Exit with `EXIT_SETTINGS_ERROR` on a settings error."""
    try:
        settings = _load(service, arguments)
        configure_logging(service, format=settings.log_format, level=settings.log_level)
        raise_file_limit()
        module = _import_service(f"services.{service}.service")
        with asyncio.Runner(loop_factory=getattr(module, "loop_factory", None)) as runner:
            runner.run(module.serve(settings))
    except SettingsError as error:
        _print_error(f"headrace {service}: {error}")
        raise typer.Exit(EXIT_SETTINGS_ERROR) from None


def _import_service(name: str) -> ModuleType:
    """Import a service's module.

    Raises:
        SettingsError: if a package is missing. A restart would fail in the same way.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingsError(
            f"a package is missing or incompatible, install it and start again: {error}"
        ) from error


def _add_service(name: str) -> None:
    def command(context: typer.Context) -> None:
        _run_service(name, context.args)

    command.__doc__ = f"Run one {name} process. `headrace {name} --help` lists its settings."
    app.command(name, context_settings=_PASS_ON, add_help_option=False)(command)


for _name in SERVICES:
    _add_service(_name)


@app.command(context_settings=_PASS_ON)
def config(
    context: typer.Context, service: Annotated[str, typer.Argument(help=", ".join(SERVICES))]
) -> None:
    """Print the effective settings of a service as YAML. Flags are those of the service."""
    if service not in SERVICES:
        raise typer.BadParameter(f"must be one of {', '.join(SERVICES)}", param_hint="SERVICE")
    try:
        effective = _load(service, context.args).model_dump(mode="json")
    except SettingsError as error:
        _print_error(str(error))
        raise typer.Exit(EXIT_SETTINGS_ERROR) from None
    print(yaml.safe_dump(effective, sort_keys=False), end="")  # noqa: T201


@app.command()
def up(
    host: Annotated[str, typer.Option(help="address on which all processes listen")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port of the gateway")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port of the gateway")] = 8001,
    router_port: Annotated[int, typer.Option(help="HTTP port of the router")] = 8002,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="number of prefill workers")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="number of decode workers")] = 1,
    colocated: Annotated[
        bool, typer.Option(help="start no prefill workers; decode workers also prefill")
    ] = False,
    model: Model = "smollm2-135m",
    keep: Annotated[
        float | None,
        typer.Option(
            min=0.05, max=1.0, help="serve a factorized model with this share of the parameters"
        ),
    ] = None,
    codec: Annotated[
        str, typer.Option(help="encoding of KV transfers: auto, raw or splitzip")
    ] = "auto",
    device: Annotated[str, typer.Option(help="device of the workers: auto, cpu or cuda")] = "auto",
    kv_format: KVFormat = "dense",
    kv_eviction: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="share of a prompt's tokens whose KV is evicted"),
    ] = 0.0,
    tls_dir: Annotated[
        Path | None,
        typer.Option(resolve_path=True, help="folder of tls.crt, tls.key, ca.crt, for mutual TLS"),
    ] = None,
    detach: Annotated[
        bool, typer.Option(help="run in the background; return when the deployment is ready")
    ] = False,
) -> None:
    """Start a router, a gateway and workers on this machine, and keep them running."""
    from services.local.up import up as start

    options = UpOptions(
        host=host,
        port=port,
        grpc_port=grpc_port,
        router_port=router_port,
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        model=model,
        keep=keep,
        codec=codec,
        device=device,
        kv_format=kv_format,
        kv_eviction=kv_eviction,
        tls_dir=tls_dir,
    )
    raise typer.Exit(start(options, detach=detach))


@app.command()
def down(port: Port = 8000) -> None:
    """Stop the deployment that `headrace up` started on this port."""
    from services.local.control import down as stop

    raise typer.Exit(stop(port))


@app.command()
def status(
    port: Port = 8000,
    as_json: Annotated[
        bool, typer.Option("--json", help="print ports and process ids as JSON to stdout")
    ] = False,
) -> None:
    """Show the processes of `headrace up` and the workers that are registered with its router."""
    from services.local.control import status as show

    raise typer.Exit(show(port, as_json=as_json))


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
    """Calibrate the codec's codebooks on the KV of a model, or a compressed KV format.

    With --kv-format fdc, palu, shard or kvquant, the result is the calibration that the KV format
    fdc:PATH, palu:PATH, shard:PATH or kvquant:PATH reads. Otherwise it is a file of codebooks.
    """
    given = flags.Given.of(locals())
    with _reported_errors("calibrate"):
        if kv_format in flags.CALIBRATED_FORMATS:
            from services.offline.kv_calibration import calibrate_kv

            calibrate_kv(model, tokenizer or model, kv_format, given, out, device=device)
        else:
            from services.offline.calibrate import calibrate as run

            given.refuse(kv_format)
            run(model, tokenizer or model, out, kv_format=kv_format, device=device)


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="file to write the kernel plan to")],
    model: Model = "smollm2-135m",
) -> None:
    """Find the fastest kernels for a model on this machine's GPU, and write a kernel plan."""
    from services.offline.tune import tune as run

    with _reported_errors("tune"):
        print(f"wrote kernel plan {run(model, out)} to {out}")  # noqa: T201


@app.command()
def kv_statistics(
    out: Annotated[Path, typer.Option(help="folder to write the JSON, the table and the plot to")],
    model: Model = "smollm2-135m",
    tokenizer: TokenizerSource = None,
    keep_kv: Annotated[bool, typer.Option(help="also write the KV, to kv.pt")] = False,
    device: Device = "auto",
) -> None:
    """Measure the exponents and compression ratios of a model's KV, layer by layer."""
    from services.offline.kv_statistics import kv_statistics as run

    with _reported_errors("kv-statistics"):
        run(model, tokenizer or model, out, keep_kv=keep_kv, device=device)


@app.command()
def compress(
    out: Annotated[Path, typer.Option(help="folder to write the checkpoint to; must not exist")],
    keep: Annotated[
        float, typer.Option(min=0.05, max=0.999, help="share of the parameters to keep")
    ],
    model: Model = "smollm2-135m",
    method: Annotated[
        str, typer.Option(help="method: fisher, svd-llm, svd-llm-v2 or basis-sharing")
    ] = "fisher",
    ranks: Annotated[
        str | None,
        typer.Option(
            help="allocation of ranks to layers: uniform, loss or log-loss; default: by method"
        ),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(min=2, help="calibration rows of 512 tokens; perplexity uses half as many"),
    ] = 32,
    device: Device = "auto",
) -> None:
    """Factorize a model by truncation-aware SVD, and report its perplexity before and after.

    An interrupted command continues from its finished layers when it is run again.
    """
    from services.offline.compress import compress as run

    with _reported_errors("compress"):
        run(model, keep, out, method, ranks, rows, device)


@app.command()
def convert(
    model: Annotated[str, typer.Option(help="file or folder of the checkpoint to convert")],
    out: Annotated[Path, typer.Option(help="folder to write the checkpoint to; must not exist")],
    tokenizer: TokenizerSource = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="dtype to write: float32, bfloat16, float16, or auto, which keeps the stored one"
        ),
    ] = "auto",
) -> None:
    """Convert an SVD-LLM, Dobi-SVD, ASVD, Basis Sharing, Hugging Face or GGUF checkpoint
    to Headrace's format."""
    from services.offline.convert import convert as run

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise typer.BadParameter("must be auto, float32, bfloat16 or float16", param_hint="--dtype")
    with _reported_errors("convert"):
        run(model, out, tokenizer, dtype)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed_version

    print(installed_version("headrace"))  # noqa: T201


@contextmanager
def _reported_errors(command: str) -> Iterator[None]:
    """Print expected errors in one line, without a traceback, and exit."""
    from runtime.errors import RuntimeFault

    try:
        yield
    except (SettingsError, RuntimeFault, OSError) as error:
        _print_error(f"headrace {command}: {error}")
        raise typer.Exit(EXIT_SETTINGS_ERROR) from None


def _print_error(message: str) -> None:
    print(message, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    app()
