"""The live page in Chromium against a real deployment: key, chat, counters, accessibility."""

import hashlib
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.deployment import Running, deployed
from tests.operate.browser import ENTER, ESCAPE, TAB, Browser, chromium, same_origin

pytestmark = [pytest.mark.operate, pytest.mark.timeout(900)]

KEY, OTHER_KEY = "sk-of-the-page", "sk-of-another-tenant"
PROMPT = "Write a short story about a mill on a river."
# Record the lengths of the answer and the numbers of two figures.
RECORD = """
window.seen = {lengths: {}, outputs: {}, running: {}};
const number = (name) => [...document.querySelectorAll('.figure')].find(
  f => f.querySelector('dt').textContent === name).querySelector('.number').textContent;
new MutationObserver(() => {
  const answer = document.querySelector('.turn.assistant .content');
  if (answer) seen.lengths[answer.textContent.length] = true;
  seen.outputs[number('Output')] = true;
  seen.running[number('In progress')] = true;
}).observe(document.body, {childList: true, subtree: true, characterData: true});
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A deployment with two tenants, whose KV is compressed."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    digests = (hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER_KEY))
    keys.write_text("".join(f"{digest}\n" for digest in digests))
    environment = {"HEADRACE_GATEWAY_API_KEYS_FILE": str(keys)}
    with deployed("--codec", "splitzip", environment=environment, api_key=KEY) as running:
        running.wait_for_all_workers()
        yield running


@pytest.fixture(scope="module")
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


def enter_key(browser: Browser, key: str = KEY) -> None:
    browser.wait(lambda: browser.find("#key-dialog").is_displayed(), "the page asks for a key")
    browser.find("#key").send_keys(key, ENTER)


def open_with_key(browser: Browser) -> None:
    enter_key(browser)
    until_ready(browser)


def until_ready(browser: Browser) -> None:
    browser.wait(lambda: browser.text("#readiness") == "Ready", "the deployment is ready")


def figure(browser: Browser, name: str) -> str:
    """Return the number of a figure as text."""
    return str(
        browser.run(
            "return [...document.querySelectorAll('.figure')].find("
            "f => f.querySelector('dt').textContent === arguments[0])"
            ".querySelector('.number').textContent",
            name,
        )
    )


def answered(browser: Browser) -> bool:
    return bool(browser.run("return !document.querySelector('.streaming')"))


@pytest.mark.parametrize("width", [360, 1400])
def test_chat_streams_and_counters_move(browser: Browser, width: int) -> None:
    browser.emulate(width, 780 if width == 360 else 900)
    open_with_key(browser)
    assert browser.text("#prefill h4") == "prefill-0"
    assert browser.text("#decode h4") == "decode-0"
    browser.run("document.getElementById('max-tokens').value = 256")
    browser.run(RECORD)
    browser.find("#message").send_keys(PROMPT, ENTER)
    browser.wait(lambda: browser.text(".turn.assistant .content"), "the first token")
    browser.wait(lambda: answered(browser), "the answer")
    browser.wait(
        lambda: len(browser.run("return window.seen.outputs")) > 1, "the rate of tokens moves"
    )
    seen = browser.run("return window.seen")
    assert len(seen["lengths"]) > 3, "tokens appear one after the other"
    assert "1" in seen["running"], "the request is in progress"
    assert "tokens/s · first token after" in browser.text(".turn.assistant .note")
    state = "#requests li:first-child"
    browser.wait(lambda: browser.text(f"{state} .state") == "done", "the request is done")
    browser.wait(lambda: "moved" in browser.text("#channel-ratio"), "KV has moved")
    assert float(figure(browser, "Compression")) > 1.05
    browser.find(f"{state} summary").click()
    browser.wait(lambda: browser.text(f"{state} .stages"), "the stages are shown")
    stages = browser.text(f"{state} .stages")
    for stage in ("Receive", "Route", "Prefill", "KV reads", "Decode", "Request id"):
        assert stage in stages
    assert browser.run("return document.documentElement.scrollWidth") == width
    spoken, shown = browser.text("#spoken"), browser.text(".turn.assistant .content")
    assert spoken.strip() == shown.strip(), "screen readers get the whole answer"


def test_answer_can_be_stopped_and_a_new_chat_begun(browser: Browser) -> None:
    open_with_key(browser)
    browser.run("document.getElementById('max-tokens').value = 4000")
    browser.run("document.getElementById('temperature').value = 2")  # an early end is improbable
    browser.find("#message").send_keys(PROMPT, ENTER)
    browser.wait(lambda: browser.text(".turn.assistant .content"), "the first token")
    assert browser.run("return document.activeElement.id") == "message"
    browser.press(TAB)
    assert browser.run("return document.activeElement.id") == "stop"
    browser.press(ENTER)
    browser.wait(lambda: answered(browser), "the answer has stopped")
    assert browser.text(".turn.assistant .note").endswith("stopped")
    assert browser.run("return document.activeElement.id") == "message"
    browser.wait(
        lambda: browser.text("#requests li:first-child .state") == "cancelled",
        "the gateway has cancelled the request",
    )
    browser.find("#new-chat").click()
    assert browser.run("return document.querySelectorAll('.turn').length") == 0
    assert browser.find("#welcome").is_displayed()


def test_key_is_asked_for_and_stays_in_the_tab(browser: Browser, deployment: Running) -> None:
    assert httpx.get(f"{deployment.url}/page/state", trust_env=False).status_code == 401
    enter_key(browser, "wrong")
    browser.wait(lambda: browser.text("#key-problem") == "The API key is unknown.", "the refusal")
    open_with_key(browser)
    browser.driver.refresh()
    until_ready(browser)
    assert browser.run("return {...sessionStorage}") == {"headrace.key": KEY}
    assert browser.run("return localStorage.length + document.cookie.length") == 0
    browser.find("#key-button").click()
    browser.find("#forget-key").click()
    browser.wait(lambda: browser.find("#key-dialog").is_displayed(), "the page asks again")
    assert browser.run("return sessionStorage.length") == 0
    enter_key(browser, OTHER_KEY)
    until_ready(browser)
    browser.wait(lambda: browser.text("#prefill h4"), "the workers are shown to each tenant")
    assert browser.text("#requests") == "", "requests of the other tenant are not"


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violations(browser: Browser, width: int, dark: bool) -> None:
    browser.emulate(width, 800, dark=dark)
    browser.wait(lambda: browser.find("#key-dialog").is_displayed(), "the page asks for a key")
    assert browser.violations() == []
    open_with_key(browser)
    browser.find("#message").send_keys("Say hello.", ENTER)
    browser.wait(lambda: browser.text(".turn.assistant .content"), "the first token")
    browser.wait(lambda: answered(browser), "the answer")
    browser.wait(lambda: browser.text("#requests li:first-child .state"), "the request is listed")
    browser.find("#requests li:first-child summary").click()
    assert browser.violations() == []


def test_page_works_with_the_keyboard_alone(browser: Browser) -> None:
    enter_key(browser)
    until_ready(browser)
    browser.run("document.activeElement.blur()")
    browser.press(TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.press(ENTER)
    assert browser.run("return document.activeElement.id") == "message"
    browser.press("Hello", ENTER)
    browser.wait(lambda: browser.text(".turn.assistant .content"), "the first token")
    browser.wait(lambda: answered(browser), "the answer")
    for _ in range(20):
        if browser.run("return document.activeElement.matches('#requests summary')"):
            break
        browser.press(TAB)
    summary = browser.focused()
    browser.press(ENTER)
    browser.wait(
        lambda: browser.run("return arguments[0].parentNode.open", summary), "the stages open"
    )
    time.sleep(1.5)  # new states arrive
    assert browser.focused() == summary, "the focus stays"


def test_page_recovers_when_the_gateway_is_unreachable(browser: Browser) -> None:
    open_with_key(browser)
    browser.offline(True)
    browser.wait(lambda: browser.text("#readiness") == "No data", "the page has no data")
    assert browser.text("#problem") == "The gateway does not answer. Trying again."
    browser.offline(False)
    until_ready(browser)
    assert not browser.find("#problem").is_displayed()


def test_reduced_motion_stops_the_droplets(browser: Browser) -> None:
    def send(*, still: bool) -> None:
        browser.emulate(1400, 900, still=still)
        browser.find("#message").send_keys(PROMPT, ENTER)
        browser.wait(lambda: answered(browser), "the answer")

    def offset() -> object:
        return browser.run("return document.querySelector('.water').style.cssText")

    open_with_key(browser)
    browser.run("document.getElementById('max-tokens').value = 2")
    send(still=True)
    browser.wait(lambda: browser.run("return !!document.querySelector('.running')"), "a transfer")
    before = offset()
    time.sleep(0.5)
    assert offset() == before, "the droplets stand still"
    send(still=False)
    browser.wait(lambda: offset() != before, "the droplets move")


def test_dialog_for_the_key_can_be_closed_and_opened_again(browser: Browser) -> None:
    browser.wait(lambda: browser.find("#key-dialog").is_displayed(), "the page asks for a key")
    browser.press(ESCAPE)
    time.sleep(1.5)
    assert not browser.find("#key-dialog").is_displayed()
    assert browser.text("#readiness") == "Key needed"
    browser.find("#key-button").click()
    open_with_key(browser)
