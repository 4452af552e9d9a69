"""The live page in Chromium against a real deployment: key, chat, counters, accessibility."""

import os
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest

from tests.harness.deployment import Running
from tests.operate.browser import ENTER, ESCAPE, TAB, Browser
from tests.operate.page.actions import (
    KEY,
    OTHER_KEY,
    PROMPT,
    answered,
    enter_key,
    figure,
    open_with_key,
    until_ready,
)

pytestmark = [pytest.mark.operate, pytest.mark.timeout(900)]

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
    browser.wait(lambda: "sent" in browser.text("#channel-ratio"), "KV was sent")
    assert float(figure(browser, "Compression")) > 1.05
    marker = "return getComputedStyle(document.querySelector(arguments[0]), '::before').transform"
    closed = browser.run(marker, f"{state} summary")
    browser.find(f"{state} summary").click()
    browser.wait(lambda: browser.text(f"{state} .stages"), "the stages are shown")
    browser.wait(
        lambda: browser.run(marker, f"{state} summary") != closed != "none", "the marker turns"
    )
    stages = browser.text(f"{state} .stages")
    for stage in ("Receive", "Wait for workers", "KV reads", "Request id"):  # KV may be early
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
    browser.wait(lambda: "The API key is unknown:" in browser.text("#key-problem"), "the refusal")
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
    for _ in range(30):
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


def copied(browser: Browser, button: str) -> bool:
    return browser.text(button).startswith("Copied")


def test_example_code_runs_as_copied(browser: Browser, deployment: Running) -> None:
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    open_with_key(browser)
    assert browser.text("#base-url") == f"{deployment.url}/v1"
    browser.find("#show-code").click()
    assert browser.violations() == []
    environment = {**os.environ, "HEADRACE_API_KEY": KEY, "NO_PROXY": "127.0.0.1"}
    for name, program in (("python", [sys.executable, "-c"]), ("curl", ["bash", "-c"])):
        button = f"[data-copies={name}]"
        browser.find(button).click()
        browser.wait(partial(copied, browser, button), "the code is copied")
        code = browser.driver.execute_async_script(
            "navigator.clipboard.readText().then(arguments[0])"
        )
        assert code == browser.text(f"#{name}")
        ended = subprocess.run(
            [*program, code], env=environment, capture_output=True, text=True, check=True
        )
        assert "Paris" in ended.stdout


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_api_reference_shows_the_openapi_document(
    browser: Browser, deployment: Running, width: int, dark: bool
) -> None:
    browser.emulate(width, 800, dark=dark)
    browser.wait(lambda: browser.find("#key-dialog").is_displayed(), "the page asks for a key")
    browser.press(ESCAPE)
    assert browser.find("#metrics-link").get_property("href") == f"{deployment.url}/metrics"
    browser.find("[href='page/reference.html']").click()
    browser.wait(lambda: browser.text("#contents"), "the reference is shown")
    contents = browser.text("#contents")
    for path in httpx.get(f"{deployment.url}/openapi.json", trust_env=False).json()["paths"]:
        assert path in contents
    assert "max_tokens" in browser.text("#operations")
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.violations() == []
