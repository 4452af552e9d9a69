"""Requests, KV formats and compression on the live page, also under overload."""

from importlib.metadata import version

import pytest

from tests.harness.deployment import Running
from tests.operate.browser import ENTER, Browser
from tests.operate.page.actions import PROMPT, answered, api, figure, note_of, open_with_key

pytestmark = [pytest.mark.operate, pytest.mark.timeout(900)]


def test_running_request_stays_on_top_while_others_are_refused(
    browser: Browser, deployment: Running
) -> None:
    open_with_key(browser)
    browser.run("document.getElementById('max-tokens').value = 4000")
    browser.run("document.getElementById('temperature').value = 2")  # an early end is improbable
    browser.find("#message").send_keys(PROMPT, ENTER)
    browser.wait(lambda: browser.text(".turn.assistant .content"), "the first token")
    prompts = {"prompt": ["x", "y"], "max_tokens": 1}  # with the chat, above the limit of two
    with api(deployment) as client:
        for _ in range(30):
            assert client.post("/v1/completions", json=prompts).status_code == 429
    group = "#requests li[data-key^='group-overloaded']"
    browser.wait(lambda: browser.run("return !!document.querySelector(arguments[0])", group), "it")
    browser.wait(lambda: browser.text(f"{group} .tokens") == "60 requests", "all are counted")
    assert browser.text("#requests li:first-child .state") == "running"
    assert browser.run("return document.querySelectorAll('#requests li.request').length") < 20
    browser.find(f"{group} summary").click()
    browser.wait(lambda: "Last request id" in browser.text(f"{group} .stages"), "the details")
    assert browser.violations() == []
    browser.find("#stop").click()
    browser.wait(lambda: answered(browser), "the answer has stopped")


def test_request_keeps_focus_and_details_when_it_ends(browser: Browser) -> None:
    open_with_key(browser)
    browser.run("document.getElementById('max-tokens').value = 200")
    browser.find("#message").send_keys(PROMPT, ENTER)
    browser.wait(lambda: browser.text("#requests li:first-child .state") == "running", "it runs")
    summary = browser.find("#requests li:first-child summary")
    browser.run("arguments[0].focus()", summary)
    browser.press(ENTER)
    browser.wait(lambda: answered(browser), "the answer")
    state = "return arguments[0].querySelector('.state').textContent"
    browser.wait(lambda: browser.run(state, summary) == "done", "the request is done")
    assert browser.focused() == summary
    assert browser.run("return arguments[0].parentNode.open", summary)


def test_page_explains_what_the_state_says(browser: Browser) -> None:
    """States that the deployment of these tests does not have."""
    open_with_key(browser)
    assert "KV format dense" in browser.text("#model")
    assert browser.text("#version") == version("headrace")
    assert "saved" in note_of(browser, "Compression") or "sent yet" in note_of(
        browser, "Compression"
    )
    browser.run(
        """const real = fetch;
        window.fetch = async (path, options) => {
          const response = await real(path, options);
          if (path !== 'page/state') return response;
          const state = await response.json();
          const moved = {raw_bytes: 1.01e9, wire_bytes: 1e9, raw_s: 0, wire_s: 0};
          Object.assign(state.kv, moved, window.kv);
          state.workers[0].kv_format = 'fp8';
          state.workers[1].kv_eviction = 0.25;
          return new Response(JSON.stringify(state));
        };
        window.kv = {faster_raw_share: 0.97};"""
    )
    expected = "97 % sent uncompressed: faster on this link"
    browser.wait(lambda: note_of(browser, "Compression") == expected, "the reason")
    browser.wait(lambda: figure(browser, "Compression") == "1.01", "the ratio of all KV")
    assert "KV format dense (25 % evicted) and fp8" in browser.text("#model")
    assert browser.text("#decode .state") == "KV format fp8"
    browser.run("window.kv = {compressible: false}")
    browser.wait(lambda: note_of(browser, "Compression") == "compression is off", "the reason")
