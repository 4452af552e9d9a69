"""One deployment and one browser for all tests of the live page."""

import hashlib
from collections.abc import Iterator

import pytest

from tests.harness.deployment import Running, deployed
from tests.operate.browser import Browser, chromium, same_origin
from tests.operate.page.actions import KEY, OTHER_KEY


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A deployment with two tenants, whose KV is compressed.

    Prompts are not cached, so that the KV of each of them is computed and sent.
    """
    keys = tmp_path_factory.mktemp("keys") / "keys"
    digests = (hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER_KEY))
    keys.write_text("".join(f"{digest}\n" for digest in digests))
    environment = {
        "HEADRACE_GATEWAY_API_KEYS_FILE": str(keys),
        "HEADRACE_GATEWAY_MAX_CONCURRENT": "2",
        "HEADRACE_PREFILL_PREFIX_CACHE": "false",
        "HEADRACE_DECODE_PREFIX_CACHE": "false",
    }
    with deployed("--codec", "splitzip", environment=environment, api_key=KEY) as running:
        running.wait_for_all_workers()
        yield running


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser, deployment: Running) -> Iterator[Browser]:
    """A tab without a key. After the test: no errors, and no request to another host."""
    started.open_tab()
    started.console()
    started.requests()
    started.emulate(1400, 900)
    started.driver.get(deployment.url)
    yield started
    sent = started.requests()
    assert any(url.endswith("/page/state") for url in sent)
    for url in sent:
        assert same_origin(url, deployment.url) or url.startswith("chrome"), url
        assert KEY not in url
    # Chromium itself reports the answers without a key, and requests while it is offline.
    assert [line for line in started.console() if "/page/state" not in line] == []
