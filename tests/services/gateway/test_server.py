"""The HTTP server requires certain methods of uvicorn's protocol class."""

from importlib.metadata import version

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.errors import SettingsError
from services.gateway.http.server import check_hooks


def test_installed_uvicorn_has_all_hooks() -> None:
    check_hooks(HttpToolsProtocol)


def test_uvicorn_without_a_hook_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")  # as in uvicorn 0.44
    with pytest.raises(SettingsError, match="_start_asgi_task") as caught:
        check_hooks(HttpToolsProtocol)
    assert f"uvicorn {version('uvicorn')} is not supported" in str(caught.value)
