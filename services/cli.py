"""The ``headrace`` command."""

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


def _load(service: str, arguments: list[str]) -> ServiceSettings:
    settings_class: type[ServiceSettings] = getattr(
        import_module(f"services.{service}.settings"), SERVICES[service]
    )
    return settings_class.load(arguments, program=f"headrace {service}")


def _run_service(service: str, arguments: list[str]) -> None:
    """Serves until a signal ends it. Exit code 2: it cannot start as it was told."""
    try:
        settings = _load(service, arguments)
        configure_logging(service, format=settings.log_format, level=settings.log_level)
        module = _imported(f"services.{service}.service")
        with asyncio.Runner(loop_factory=getattr(module, "loop_factory", None)) as runner:
            runner.run(module.serve(settings))
    except SettingsError as error:
        print(f"headrace {service}: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None


def _imported(name: str) -> ModuleType:
    """Raises SettingsError: another start would find no more packages than this one."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SettingsError(f"a package is missing, or does not fit: {error}") from error


def _add_service(name: str) -> None:
    def command(context: typer.Context) -> None:
        _run_service(name, context.args)

    command.__doc__ = f"Run one {name}; `headrace {name} --help` lists its settings."
    app.command(name, context_settings=_PASS_ON, add_help_option=False)(command)


for _name in SERVICES:
    _add_service(_name)


@app.command(context_settings=_PASS_ON)
def config(context: typer.Context, service: Annotated[str, typer.Argument()]) -> None:
    """Print a service's effective settings as YAML; takes the same flags as the service."""
    if service not in SERVICES:
        raise typer.BadParameter(f"one of {', '.join(SERVICES)}", param_hint="SERVICE")
    try:
        effective = _load(service, context.args).model_dump(mode="json")
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None
    print(yaml.safe_dump(effective, sort_keys=False), end="")  # noqa: T201


@app.command()
def up(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the gateway's HTTP port")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="the gateway's gRPC port")] = 8001,
    router_port: Annotated[int, typer.Option(help="the router's HTTP port")] = 8002,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="prefill workers")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="decode workers")] = 1,
    colocated: Annotated[bool, typer.Option(help="one worker does both phases")] = False,
    model: Annotated[str, typer.Option(help="name or path of a checkpoint")] = "smollm2-135m",
    keep: Annotated[
        float | None,
        typer.Option(min=0.05, max=1.0, help="share of parameters a factorization keeps"),
    ] = None,
    codec: Annotated[str, typer.Option(help="auto, raw or splitzip")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    kv_format: Annotated[
        str, typer.Option(help="KV format: a built-in name or module:Class")
    ] = "dense",
    detach: Annotated[bool, typer.Option(help="go on in the background")] = False,
) -> None:
    """Start router, gateway and workers on this machine, and keep them running."""
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
def down(port: Annotated[int, typer.Option(help="the gateway's HTTP port")] = 8000) -> None:
    """Stop what `headrace up` started."""
    from services.local.up import down as stop

    raise typer.Exit(stop(port))


@app.command()
def status(
    port: Annotated[int, typer.Option(help="the gateway's HTTP port")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="for programs, to stdout")] = False,
) -> None:
    """Show the processes of `headrace up` and the workers that the router knows."""
    from services.local.up import status as show

    raise typer.Exit(show(port, as_json=as_json))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="where the codebooks go")],
    model: Annotated[str, typer.Option(help="name or path of a checkpoint")] = "smollm2-135m",
    tokenizer: Annotated[str | None, typer.Option(help="where it differs from the model")] = None,
    kv_format: Annotated[
        str, typer.Option(help="KV format: a built-in name or module:Class")
    ] = "dense",
) -> None:
    """Calibrate the codec's codebooks on a model's own KV."""
    from services.offline.calibrate import calibrate as make

    with _refusals("calibrate"):
        make(model, tokenizer or model, out, kv_format=kv_format)


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="where the kernel plan goes")],
    model: Annotated[str, typer.Option(help="name or path of a checkpoint")] = "smollm2-135m",
) -> None:
    """Measure how this machine's GPU computes a model fastest: a kernel plan for all workers."""
    from services.offline.tune import tune as make

    with _refusals("tune"):
        print(f"kernel plan {make(model, out)}: {out}")  # noqa: T201


@app.command()
def kv_statistics(
    out: Annotated[Path, typer.Option(help="folder of the JSON, the table and the plot")],
    model: Annotated[str, typer.Option(help="name or path of a checkpoint")] = "smollm2-135m",
    tokenizer: Annotated[str | None, typer.Option(help="where it differs from the model")] = None,
    keep_kv: Annotated[bool, typer.Option(help="write the KV itself, too: kv.pt")] = False,
) -> None:
    """Measure exponents and compression ratios, layer by layer, on a model's own KV."""
    from services.offline.kv_statistics import kv_statistics as make

    with _refusals("kv-statistics"):
        make(model, tokenizer or model, out, keep_kv=keep_kv)


@app.command()
def compress(
    out: Annotated[Path, typer.Option(help="folder of the new checkpoint")],
    keep: Annotated[float, typer.Option(min=0.05, max=0.999, help="share of parameters kept")],
    model: Annotated[str, typer.Option(help="name or path of a checkpoint")] = "smollm2-135m",
    method: Annotated[
        str, typer.Option(help="fisher, svd-llm, svd-llm-v2 or basis-sharing")
    ] = "fisher",
    ranks: Annotated[
        str | None, typer.Option(help="uniform, loss or log-loss, if not the method's own")
    ] = None,
    rows: Annotated[
        int, typer.Option(min=2, help="of 512 tokens, to calibrate on; half as many to report on")
    ] = 32,
) -> None:
    """Factorize a model by truncation-aware SVD, and report perplexity before and after."""
    from services.offline.compress import compress as make

    with _refusals("compress"):
        make(model, keep, out, method, ranks, rows)


@app.command()
def convert(
    model: Annotated[str, typer.Option(help="a checkpoint of any family: file or folder")],
    out: Annotated[Path, typer.Option(help="folder of the new checkpoint")],
    tokenizer: Annotated[str | None, typer.Option(help="if it is not beside the model")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
) -> None:
    """Convert SVD-LLM, Dobi-SVD, ASVD, Basis Sharing, Hugging Face or GGUF to Headrace's form."""
    from services.offline.convert import convert as make

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise typer.BadParameter("auto, float32, bfloat16 or float16", param_hint="--dtype")
    with _refusals("convert"):
        make(model, out, tokenizer, dtype)


@contextmanager
def _refusals(command: str) -> Iterator[None]:
    """What was asked and cannot be done is said in one line; exit code 2."""
    from runtime.errors import RuntimeFault

    try:
        yield
    except (SettingsError, RuntimeFault, OSError) as error:
        print(f"headrace {command}: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))  # noqa: T201


if __name__ == "__main__":
    app()
