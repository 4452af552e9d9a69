"""Screenshots of the live page for the READMEs: ``python -m tests.operate.screenshots``.

Starts a deployment with two prefill and two decode workers, and writes ``deploy/images/page-*.png``
under light load and under overload.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.harness.deployment import Running, deployed
from tests.operate.browser import ENTER, Browser, chromium

IMAGES = Path(__file__).parents[2] / "deploy" / "images"
WARM_UP_S = 45.0
"""Time in seconds in which the charts of the figures are filled."""
OVERLOAD_S = 20.0
"""Time in seconds after which an overloaded deployment refuses requests."""
CLIENTS, MANY_CLIENTS = 3, 160
PROMPTS = (
    "Write a short story about a mill on a river.",
    "What is the capital of France?",
    "Explain how a water turbine works. " * 20,
    "List five uses of a canal.",
    "Summarize this text in one sentence: " + "The river feeds the reservoir. " * 60,
)


@contextmanager
def load(running: Running, clients: int) -> Iterator[None]:
    """Send requests from some clients until the block ends."""
    stop = threading.Event()

    def send(first: int) -> None:
        numbers = itertools.count(first)
        with httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
            while not stop.is_set():
                number = next(numbers)
                prompt = PROMPTS[number % len(PROMPTS)]
                body = {"messages": [{"role": "user", "content": prompt}]}
                limit = 16 + 37 * number % 80
                client.post("/v1/chat/completions", json={**body, "max_tokens": limit})
                stop.wait(0.3 * (number % 4))

    threads = [threading.Thread(target=send, args=(2 * n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def photograph_chat(browser: Browser, running: Running) -> None:
    """Write the images of a page that answers a chat."""
    browser.emulate(1400, 900)
    browser.driver.get(running.url)
    browser.wait(lambda: browser.text("#readiness") == "Ready", "the deployment is ready")
    time.sleep(WARM_UP_S)
    browser.find("#message").send_keys("What is a water mill?", ENTER)
    content = ".turn.assistant .content"
    browser.wait(lambda: len(browser.text(content)) > 300, "an answer of some lines", 120)
    for name, width, height, dark in (
        ("light", 1400, 900, False),
        ("dark", 1400, 900, True),
        ("phone", 360, 780, False),
    ):
        browser.emulate(width, height, dark=dark)
        time.sleep(1.2)  # the map adapts to its size, and the next state arrives
        browser.wait(lambda: browser.run("return document.querySelector('.running')"), "KV moves")
        browser.screenshot(IMAGES / f"page-{name}.png")


def photograph_overload(browser: Browser) -> None:
    """Write the image of a page while requests are refused."""
    browser.emulate(1400, 900)
    browser.find("#new-chat").click()
    time.sleep(OVERLOAD_S)
    refused = "return !!document.querySelector('#requests [data-key=group-overloaded]')"
    browser.wait(lambda: browser.run(refused), "requests are refused", 120)
    browser.run("document.querySelector('.flow').scrollIntoView()")
    browser.screenshot(IMAGES / "page-overload.png")


def main() -> None:
    """Write the images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    flags = ("--codec", "splitzip", "--prefill", "2", "--decode", "2")
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(*flags, sheds=True) as running,
        chromium(Path(folder)) as browser,
    ):
        running.wait_for_all_workers()
        with load(running, CLIENTS):
            photograph_chat(browser, running)
            with load(running, MANY_CLIENTS):
                photograph_overload(browser)


if __name__ == "__main__":
    main()
