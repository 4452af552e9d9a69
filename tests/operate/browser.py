"""Headless Chromium from Debian's packages, driven by Selenium, and axe-core from npm."""

import base64
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium.webdriver import Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.operate.debian import CACHE, unpack

AXE = "4.14.1"
_FLAGS = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--no-sandbox",  # its helper must belong to root; only this project's page is opened
    "--disable-component-update",
)
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>"""


class Browser:
    """Chromium with one tab."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open_tab(self) -> None:
        """Replace the tab with a new one, which has a session storage of its own."""
        self.driver.switch_to.new_window("tab")
        kept = self.driver.current_window_handle
        for handle in self.driver.window_handles:
            if handle != kept:
                self.driver.switch_to.window(handle)
                self.driver.close()
        self.driver.switch_to.window(kept)

    def emulate(self, width: int, height: int, *, dark: bool = False, still: bool = False) -> None:
        """Set the size of the viewport in px, the color scheme and reduced motion."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        media = [{"name": name, "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def offline(self, offline: bool) -> None:
        """Cut or restore the network of the tab."""
        network = {"offline": offline, "latency": 0, "downloadThroughput": -1}
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {**network, "uploadThroughput": -1}
        )

    def find(self, selector: str) -> WebElement:
        """Return the first element that matches a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def focused(self) -> WebElement:
        """Return the element that has the focus."""
        return self.driver.switch_to.active_element

    def text(self, selector: str) -> str:
        """Return the text of an element, also if it is not visible."""
        return str(self.find(selector).get_property("textContent"))

    def run(self, script: str, *arguments: Any) -> Any:
        """Return the result of a script."""
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def wait(self, condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutException: if it does not within ``limit_s`` seconds.
        """
        WebDriverWait(self.driver, limit_s, 0.05).until(lambda _: condition(), what)

    def console(self) -> list[str]:
        """Return the messages of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def requests(self) -> list[str]:
        """Return the URLs that were requested since the last call."""
        events = [
            json.loads(entry["message"])["message"]
            for entry in self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        ]
        sent = (e["params"] for e in events if e["method"] == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in sent]

    def violations(self) -> list[str]:
        """Return what axe-core finds wrong in the page, with the elements."""
        self.run(axe_core())
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run({resultTypes: ['violations']}).then(done)"
        )
        return [
            f"{violation['id']}: {node['target']}: {node['failureSummary']}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]

    def screenshot(self, path: Path) -> None:
        """Write the viewport as a PNG."""
        image = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        path.write_bytes(base64.b64decode(image["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run Chromium until the block ends, with its profile and its fonts in ``folder``."""
    packages = unpack("chromium", "chromium-driver", "fonts-inter")
    fonts = folder / "fonts.conf"
    fonts.write_text(_FONTS.format(fonts=packages.root / "usr/share/fonts", cache=folder / "fonts"))
    options = ChromeOptions()
    options.binary_location = str(packages.program("usr/lib/chromium/chromium"))
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    environment = packages.environment | {"FONTCONFIG_FILE": str(fonts), "NO_PROXY": "127.0.0.1"}
    service = ChromeService(str(packages.program("chromedriver")), env=environment)
    driver = Chrome(options=options, service=service)
    try:
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()


@cache
def axe_core() -> str:
    """Return the script of axe-core, which checks the accessibility of a page.

    Raises:
        CalledProcessError: if npm cannot provide it.
    """
    npm = shutil.which("npm") or "npm"
    folder = CACHE / f"axe-core-{AXE}"
    script = folder / "axe.min.js"
    if not script.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", "--silent", "--pack-destination", str(folder), f"axe-core@{AXE}"]
        subprocess.run(command, check=True, cwd=folder, timeout=120)
        archive = (folder / f"axe-core-{AXE}.tgz").read_bytes()
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            member = packed.extractfile("package/axe.min.js")
            assert member is not None
            script.write_bytes(member.read())
    return script.read_text()


def same_origin(url: str, base: str) -> bool:
    """Return whether two URLs have the same scheme, host and port."""
    return urlsplit(url)[:2] == urlsplit(base)[:2]


ENTER, ESCAPE, TAB = Keys.ENTER, Keys.ESCAPE, Keys.TAB
