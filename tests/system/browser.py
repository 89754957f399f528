"""Headless Chromium, driven through chromedriver's HTTP interface (WebDriver).

It needs the standard library alone.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
PROGRAMS = ("chromedriver", "chromium")  # from Debian's packages chromium-driver and chromium
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One page at a time. The driver records its console messages and its requests."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    def open(self, page: Path) -> None:
        self._post("url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what the JavaScript function body `script` returns in the page."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def each(self, selector: str, expression: str = "e.textContent") -> list[Any]:
        """Return the value of a JavaScript expression for each element `e` of `selector`."""
        return self.run(
            f"return [...document.querySelectorAll(arguments[0])].map((e) => {expression})",
            selector,
        )

    def click(self, selector: str) -> None:
        """Click as a user does: the element must be visible and not covered."""
        element = self._in_sight(selector)
        self._post(f"element/{element[ELEMENT]}/click", {})

    def drag(
        self, selector: str, start: tuple[int, int], end: tuple[int, int], *, press: bool = True
    ) -> None:
        """Move the mouse from `start` to `end`, in pixels from the element's middle.

        The button is held if `press`.
        """
        element = self._in_sight(selector)
        moves = [
            _move(element, *start),
            {"type": "pointerDown", "button": 0},
            _move(element, *end),
            {"type": "pointerUp", "button": 0},
        ]
        moves = moves if press else [move for move in moves if move["type"] == "pointerMove"]
        self._post("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def _in_sight(self, selector: str) -> dict[str, str]:
        element: dict[str, str] = self._post(
            "element", {"using": "css selector", "value": selector}
        )
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        return element

    def resize(self, width: int, height: int) -> None:
        self._post("window/rect", {"width": width, "height": height})

    def emulate_width(self, width: int, height: int) -> None:
        """Show pages as a screen of this size does, which may be narrower than a window can be."""
        params = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._execute("Emulation.setDeviceMetricsOverride", params)

    def end_emulation(self) -> None:
        """Show pages in the window's own size again."""
        self._execute("Emulation.clearDeviceMetricsOverride", {})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(_ask("GET", f"{self._url}/screenshot")))

    def emulate(self, scheme: str) -> None:
        """Prefer "light" or "dark" colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._execute("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """Return the console messages of level warning and above since the last call."""
        return [
            entry["message"]
            for entry in self._log("browser")
            if entry["level"] in ("WARNING", "SEVERE")
        ]

    def requests(self) -> list[str]:
        """Return the addresses requested by pages from files since the last call, their own first.

        Inline data is left out.
        """
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        asked = [
            event["params"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        urls = [ask["request"]["url"] for ask in asked if ask["documentURL"].startswith("file:")]
        return [url for url in urls if not url.startswith("data:")]

    def _execute(self, command: str, parameters: dict[str, Any]) -> None:
        """Run a command of Chromium's DevTools."""
        self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def _log(self, kind: str) -> list[dict[str, Any]]:
        return self._post("se/log", {"type": kind})

    def _post(self, command: str, body: dict[str, Any]) -> Any:
        return _ask("POST", f"{self._url}/{command}", body)


def _move(element: dict[str, str], x: int, y: int) -> dict[str, Any]:
    return {"type": "pointerMove", "duration": 20, "origin": element, "x": x, "y": y}


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Yield a browser with the empty folder `profile` for its files; it ends with the block."""
    driver = subprocess.Popen([PROGRAMS[0], "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        base = f"http://127.0.0.1:{_port(driver)}/session"
        options = {
            "binary": shutil.which(PROGRAMS[1]),
            "args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1400,1000"],
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = _ask("POST", base, {"capabilities": {"alwaysMatch": wanted}})
        try:
            yield Browser(f"{base}/{session['sessionId']}")
        finally:
            _ask("DELETE", f"{base}/{session['sessionId']}")
    finally:
        driver.terminate()
        driver.communicate(timeout=20)


def _port(driver: subprocess.Popen[str]) -> int:
    """Return the free port that the driver chose, from its output."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip(".\n").rpartition(" ")[2])
    raise AssertionError("chromedriver did not start")


def _ask(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(json.load(error)["value"]["message"]) from None
