"""The ``headrace`` command. Commands import their modules when they run, for a fast ``--help``."""

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
from services.common.logging import configure_logging
from services.common.settings import ServiceSettings
from services.local.options import UpOptions
from services.local.supervisor import EXIT_SETTINGS_ERROR

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

Port = Annotated[int, typer.Option(help="HTTP port of the deployment's gateway")]
Model = Annotated[str, typer.Option(help="name or path of a checkpoint")]
KVFormat = Annotated[str, typer.Option(help="KV format: a built-in name or module:Class")]
TokenizerSource = Annotated[
    str | None, typer.Option(help="model that has the tokenizer, if not the same")
]


def _load(service: str, arguments: list[str]) -> ServiceSettings:
    settings_class: type[ServiceSettings] = getattr(
        import_module(f"services.{service}.settings"), SERVICES[service]
    )
    return settings_class.load(arguments, program=f"headrace {service}")


def _run_service(service: str, arguments: list[str]) -> None:
    """Run a service until a signal ends it. Errors in settings have their own exit code."""
    try:
        settings = _load(service, arguments)
        configure_logging(service, format=settings.log_format, level=settings.log_level)
        module = _import_service(f"services.{service}.service")
        with asyncio.Runner(loop_factory=getattr(module, "loop_factory", None)) as runner:
            runner.run(module.serve(settings))
    except SettingsError as error:
        _print_error(f"headrace {service}: {error}")
        raise typer.Exit(EXIT_SETTINGS_ERROR) from None


def _import_service(name: str) -> ModuleType:
    """Import a service's module.

    Raises:
        SettingsError: if a package is missing, because a restart would not find it either.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingsError(f"a package is missing or incompatible: {error}") from error


def _add_service(name: str) -> None:
    def command(context: typer.Context) -> None:
        _run_service(name, context.args)

    command.__doc__ = f"Run one {name} process; `headrace {name} --help` lists its settings."
    app.command(name, context_settings=_PASS_ON, add_help_option=False)(command)


for _name in SERVICES:
    _add_service(_name)


@app.command(context_settings=_PASS_ON)
def config(context: typer.Context, service: Annotated[str, typer.Argument()]) -> None:
    """Print the effective settings of a service as YAML; takes the same flags as the service."""
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
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port of the gateway")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port of the gateway")] = 8001,
    router_port: Annotated[int, typer.Option(help="HTTP port of the router")] = 8002,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="number of prefill workers")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="number of decode workers")] = 1,
    colocated: Annotated[
        bool, typer.Option(help="decode workers prefill too, without prefill workers")
    ] = False,
    model: Model = "smollm2-135m",
    keep: Annotated[
        float | None,
        typer.Option(min=0.05, max=1.0, help="factorize: share of parameters to keep"),
    ] = None,
    codec: Annotated[str, typer.Option(help="auto, raw or splitzip")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    kv_format: KVFormat = "dense",
    detach: Annotated[bool, typer.Option(help="return when ready, run in the background")] = False,
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
    """Show the processes of `headrace up` and the workers that are registered at its router."""
    from services.local.control import status as show

    raise typer.Exit(show(port, as_json=as_json))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="file for the codebooks")],
    model: Model = "smollm2-135m",
    tokenizer: TokenizerSource = None,
    kv_format: KVFormat = "dense",
) -> None:
    """Calibrate the codec's codebooks on a model's own KV."""
    from services.offline.calibrate import calibrate as run

    with _reported_errors("calibrate"):
        run(model, tokenizer or model, out, kv_format=kv_format)


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="file for the kernel plan")],
    model: Model = "smollm2-135m",
) -> None:
    """Measure the fastest kernels for a model on this machine's GPU, as a plan for all workers."""
    from services.offline.tune import tune as run

    with _reported_errors("tune"):
        print(f"kernel plan {run(model, out)}: {out}")  # noqa: T201


@app.command()
def kv_statistics(
    out: Annotated[Path, typer.Option(help="folder for the JSON, the table and the plot")],
    model: Model = "smollm2-135m",
    tokenizer: TokenizerSource = None,
    keep_kv: Annotated[bool, typer.Option(help="also write the KV itself, as kv.pt")] = False,
) -> None:
    """Measure exponents and compression ratios of each layer on a model's own KV."""
    from services.offline.kv_statistics import kv_statistics as run

    with _reported_errors("kv-statistics"):
        run(model, tokenizer or model, out, keep_kv=keep_kv)


@app.command()
def compress(
    out: Annotated[Path, typer.Option(help="folder for the new checkpoint")],
    keep: Annotated[float, typer.Option(min=0.05, max=0.999, help="share of parameters to keep")],
    model: Model = "smollm2-135m",
    method: Annotated[
        str, typer.Option(help="fisher, svd-llm, svd-llm-v2 or basis-sharing")
    ] = "fisher",
    ranks: Annotated[
        str | None, typer.Option(help="uniform, loss or log-loss; default: depends on the method")
    ] = None,
    rows: Annotated[
        int,
        typer.Option(min=2, help="calibration rows of 512 tokens; perplexity is of half as many"),
    ] = 32,
) -> None:
    """Factorize a model by truncation-aware SVD, and report perplexity before and after."""
    from services.offline.compress import compress as run

    with _reported_errors("compress"):
        run(model, keep, out, method, ranks, rows)


@app.command()
def convert(
    model: Annotated[str, typer.Option(help="file or folder of the checkpoint to convert")],
    out: Annotated[Path, typer.Option(help="folder for the new checkpoint")],
    tokenizer: TokenizerSource = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
) -> None:
    """Convert an SVD-LLM, Dobi-SVD, ASVD, Basis Sharing, Hugging Face or GGUF checkpoint."""
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
