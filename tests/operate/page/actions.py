"""Actions on the live page, and values read from it, for its tests."""

import httpx

from tests.harness.deployment import Running
from tests.operate.browser import ENTER, Browser

KEY, OTHER_KEY = "sk-of-the-page", "sk-of-another-tenant"
PROMPT = "Write a short story about a mill on a river."


def enter_key(browser: Browser, key: str = KEY) -> None:
    browser.wait(lambda: browser.find("#key-dialog").is_displayed(), "the page asks for a key")
    browser.find("#key").send_keys(key, ENTER)


def open_with_key(browser: Browser) -> None:
    enter_key(browser)
    until_ready(browser)


def until_ready(browser: Browser) -> None:
    browser.wait(lambda: browser.text("#readiness") == "Ready", "the deployment is ready")


def api(deployment: Running) -> httpx.Client:
    """Return a client with the key of the page."""
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.Client(base_url=deployment.url, headers=headers, timeout=60, trust_env=False)


def note_of(browser: Browser, name: str) -> str:
    """Return the text below the number of a figure."""
    return str(
        browser.run(
            "return [...document.querySelectorAll('.figure')].find("
            "f => f.querySelector('dt').textContent === arguments[0])"
            ".querySelector('dd + dd').textContent",
            name,
        )
    )


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
