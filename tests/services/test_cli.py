"""The ``headrace`` command: ports, errors in one line, and exit codes."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runtime.parallel.partition import MAX_RANKS
from services import cli
from services.cli_errors import EXIT_INTERRUPTED, describe
from services.common.http_server import listen
from services.local import up as up_module
from services.local.options import UpOptions
from services.local.supervisor import EXIT_SETTINGS_ERROR
from tests.ports import free_ports


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def refused(*arguments: str) -> str:
    """Return the only line that a command prints when it refuses its arguments."""
    result = run(*arguments)
    assert result.exit_code == EXIT_SETTINGS_ERROR
    assert isinstance(result.exception, SystemExit), "not a traceback"
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_version_is_a_command_and_an_option() -> None:
    command, option = run("version"), run("--version")
    assert command.exit_code == option.exit_code == 0
    assert command.stdout == option.stdout
    assert run("--help").stdout.count("Disaggregated prefill/decode serving") == 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """Options of the deployments that would have been started."""
    found: list[UpOptions] = []

    def start(options: UpOptions, *, detach: bool) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(up_module, "up", start)
    return found


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A free port, with an empty cache; preparing a deployment on it is an error."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(up_module, "prepare", _must_not_prepare)
    monkeypatch.setattr(up_module, "configure_logging", lambda *_, **__: None)
    return str(free_ports(3)[0])


def _must_not_prepare(*_: object) -> None:
    raise AssertionError("the preparation has started")


@pytest.mark.parametrize("value", ["-1", "0", "65536", "70000"])
@pytest.mark.parametrize(
    "command", ["up --port", "up --grpc-port", "up --router-port", "down --port", "status --port"]
)
def test_ports_out_of_range_are_refused(command: str, value: str) -> None:
    result = run(*command.split(), value)
    assert result.exit_code == EXIT_SETTINGS_ERROR
    assert isinstance(result.exception, SystemExit), "not a traceback"
    assert f"Invalid value for '{command.split()[1]}'" in result.stderr


def test_port_moves_the_ports_of_grpc_and_the_router(started: list[UpOptions]) -> None:
    assert run("up", "--port", "9000").exit_code == 0
    assert run("up", "--port", "9000", "--router-port", "9100").exit_code == 0
    assert run("up").exit_code == 0
    assert [[port for _, port in options.ports] for options in started] == [
        [9000, 9001, 9002],
        [9000, 9001, 9100],
        [8000, 8001, 8002],
    ]


def test_ranks_of_a_role_override_those_of_all_workers(started: list[UpOptions]) -> None:
    for flags in ((), ("--tp", "4"), ("--tp", "4", "--decode-tp", "2"), ("--prefill-tp", "3")):
        assert run("up", *flags).exit_code == 0
    ranks = [(options.prefill_tp, options.decode_tp) for options in started]
    assert ranks == [(1, 1), (4, 4), (4, 2), (3, 1)]


def test_flags_allow_the_maximum_number_of_ranks(started: list[UpOptions]) -> None:
    assert run("up", "--tp", str(MAX_RANKS)).exit_code == 0
    for flag in ("--tp", "--prefill-tp", "--decode-tp"):
        assert f"Invalid value for '{flag}'" in run("up", flag, str(MAX_RANKS + 1)).stderr


@pytest.mark.parametrize("flags", [(), ("--detach",)])
def test_too_few_gpus_are_refused_before_the_preparation(
    port: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    line = refused("up", "--port", port, "--tp", "2", *flags)
    assert "the workers need 4 GPUs; visible: 3 (0, 1, 2)" in line


def test_derived_port_out_of_range_is_refused(port: str) -> None:
    assert refused("up", "--port", "65535") == (
        "headrace up: --grpc-port 65536: must be from 1 to 65535"
    )
    assert "--router-port 65536" in refused("up", "--router-port", "65535", "--routers", "2")


def test_taken_port_is_refused_before_the_preparation(port: str) -> None:
    with listen("127.0.0.1", int(port) + 2):
        line = refused("up", "--port", port)
    assert f"cannot listen on 127.0.0.1:{int(port) + 2}" in line
    assert "choose another --router-port" in line


@pytest.mark.parametrize(
    ("kv_format", "reason"),
    [
        ("fdc", "create it with `headrace calibrate --kv-format fdc --out FILE`"),
        ("shard:missing", "headrace calibrate --kv-format shard --out missing"),
        ("fp7", "unknown KV format 'fp7'"),
        ("no_such_module:Format", "cannot import 'no_such_module'"),
    ],
)
@pytest.mark.parametrize("command", ["up", "prepare"])
def test_kv_format_is_refused_before_the_preparation(
    port: str, command: str, kv_format: str, reason: str
) -> None:
    flags = ("--port", port) if command == "up" else ()
    assert reason in refused(command, *flags, "--kv-format", kv_format, "--keep", "0.9")


@pytest.mark.parametrize("command", ["up", "up --detach", "prepare", "pull"])
def test_cache_that_cannot_be_written_is_one_line(
    port: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    model = tmp_path / "model.gguf"
    model.touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    name, *flags = command.split()
    flags += ["--port", port] if name == "up" else []
    flags += ["--model", str(model)] if name == "prepare" else []
    line = refused(name, *flags)
    assert line.startswith(f"headrace {name}: ")
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_user_without_a_home_folder_is_told_to_set_the_cache(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert "set HEADRACE_CACHE" in refused(command)


def test_full_disk_is_one_line(port: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "cache" / "seal"))
    monkeypatch.setattr(up_module, "prepare", _raising(error))
    line = refused("up", "--port", port)
    assert f"{error.filename}: No space left on device; HEADRACE_CACHE" in line


@pytest.mark.parametrize("pickled", [True, False])
def test_conversion_without_a_tokenizer_names_the_flag(pickled: bool, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    model.touch()
    line = refused(
        *("convert", "--model", str(model if pickled else tmp_path)),
        *("--out", str(tmp_path / "out")),
    )
    assert line.startswith(f"headrace convert: {tmp_path} has no tokenizer.json: add --tokenizer")


def test_error_outside_the_cache_does_not_mention_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/cache")
    assert describe(OSError(errno.ENOSPC, "full", "/data/x")) == "/data/x: full"
    assert describe(OSError("full")) == "full"


def test_ctrl_c_during_the_preparation_is_no_failure(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_module, "prepare", _raising(KeyboardInterrupt()))
    result = run("up", "--port", port)
    assert result.exit_code == EXIT_INTERRUPTED
    assert result.stderr == "headrace up: interrupted\n"


def test_fault_of_a_service_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor restarts a service with exit code 1, but not with exit code 2."""
    monkeypatch.setattr(cli, "run_service", _raising(OSError(errno.ENOSPC, "full")))
    result = run("router")
    assert isinstance(result.exception, OSError)
    assert result.exit_code == 1


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail
