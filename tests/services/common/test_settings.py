"""Settings: precedence of sources, error messages, and hosts that need a cluster token."""

from pathlib import Path

import pytest

from services.common.addresses import is_loopback
from services.common.errors import SettingsError
from services.common.settings import ServiceSettings
from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings

ALL_SERVICES = [GatewaySettings, RouterSettings, PrefillSettings, DecodeSettings]


def test_later_sources_override_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("slots: 9\nport: 5\nmax_running: 3\n")
    monkeypatch.setenv("HEADRACE_DECODE_PORT", "6")
    monkeypatch.setenv("HEADRACE_DECODE_MAX_RUNNING", "4")
    settings = DecodeSettings.load([f"--config={file}", "--max-running", "5"])
    assert (settings.slots, settings.port, settings.max_running) == (9, 6, 5)
    assert settings.codec == "auto"


def test_cluster_token_comes_from_one_variable_for_all_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "secret")
    settings = DecodeSettings.load([])
    assert settings.token == "secret"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "99999"], "port"),
        (["--codec", "zip"], "codec"),
        (["--max-waiting", "0"], "max.waiting"),
        (["--config", "/no/such/file"], "no settings file"),
        (["--config"], "--config needs a file"),
    ],
)
def test_error_names_the_invalid_setting(arguments: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        DecodeSettings.load(arguments)


def test_help_shows_the_bounds_of_a_setting_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("port: 5\n")
    with pytest.raises(SystemExit):
        DecodeSettings.load(["--help", "--config", str(file)])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("after SIGTERM, seconds [0<=x<=3600]") == 1
    assert "[0<=x<=3600] [0<=x<=3600]" not in shown


def test_misspelt_key_in_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("slotz: 9\n")
    with pytest.raises(SettingsError, match="slotz"):
        DecodeSettings.load(["--config", str(file)])


def test_invalid_yaml_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_text("slots: [9\n")
    with pytest.raises(SettingsError, match="not valid YAML"):
        DecodeSettings.load(["--config", str(file)])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"- slots\n", "must be a YAML mapping"), (b"\xff\xfe\x00", "decode.yaml")],
)
def test_file_without_settings_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "decode.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        DecodeSettings.load(["--config", str(file)])


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_CLUSTER_TOKEN", raising=False)


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("settings_class", ALL_SERVICES)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "2001:db8::1", ""])
def test_open_host_without_cluster_token_is_refused(
    settings_class: type[ServiceSettings], host: str
) -> None:
    with pytest.raises(SettingsError, match="--insecure") as caught:
        settings_class.load([f"--host={host}"], program="headrace service")
    assert repr(host) in str(caught.value)
    assert "HEADRACE_CLUSTER_TOKEN" in str(caught.value)
    assert settings_class.load([f"--host={host}", "--insecure"]).insecure


@pytest.mark.parametrize("settings_class", ALL_SERVICES)
def test_open_host_with_cluster_token_is_accepted(
    settings_class: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "secret")
    assert settings_class.load(["--host=0.0.0.0"]).host == "0.0.0.0"
    monkeypatch.setenv("HEADRACE_CLUSTER_TOKEN", "")
    with pytest.raises(SettingsError, match="no cluster token"):
        settings_class.load(["--host=0.0.0.0"])


TLS_FILES = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("settings_class", ALL_SERVICES)
def test_mutual_tls_replaces_the_cluster_token_and_comes_from_the_same_variables_for_all_services(
    settings_class: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in TLS_FILES.items():
        monkeypatch.setenv(f"HEADRACE_TLS_{name}_FILE", file)
    flags = ["--host=0.0.0.0"]
    if "routers" in settings_class.model_fields:
        with pytest.raises(SettingsError, match="the router http://r:1 must have an https:// URL"):
            settings_class.load([*flags, "--routers=http://r:1"])
        flags.append("--routers=https://r:1")
    settings = settings_class.load(flags)
    assert settings.tls_ca_file == Path("ca.crt")
    with pytest.raises(SettingsError, match=r"tls_cert_file tls\.crt cannot be read: No such"):
        _ = settings.tls
    monkeypatch.delenv("HEADRACE_TLS_KEY_FILE")
    with pytest.raises(SettingsError, match="mutual TLS also needs tls_key_file"):
        settings_class.load(flags)


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_loopback_host_needs_no_cluster_token(host: str) -> None:
    assert GatewaySettings.load(["--host", host]).host == host


@pytest.mark.parametrize(
    ("addresses", "loopback"),
    [
        (["127.0.0.1", "::1"], True),
        (["::ffff:127.0.0.1"], True),
        (["fe80::1%eth0"], False),
        (["127.0.0.1", "192.0.2.1"], False),
        ([], False),
    ],
)
def test_name_is_loopback_if_all_its_addresses_are(
    addresses: list[str], loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    assert is_loopback("worker.example") is loopback


def test_unknown_name_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no such name")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    assert not is_loopback("worker.example")
