"""Chromium driven over the DevTools protocol: one tab with its requests and console errors."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect
from websockets.sync.connection import Connection

PROGRAM = shutil.which("chromium")
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
    ),
)
TIMEOUT_S = 60.0


class Tab:
    """One page in a browser."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._calls = connection, 0
        self.requests: list[str] = []
        """Requested URLs."""
        self.errors: list[str] = []
        """Console errors, including violations of the Content-Security-Policy."""
        self._events: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict:
        """Call a method of the protocol and return its result."""
        self._calls += 1
        self._connection.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=TIMEOUT_S))
            if message.get("id") == self._calls:
                assert "error" not in message, message
                return message["result"]
            self._record(message)

    def emulate(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the window size and the preferred colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        self.loaded()

    def loaded(self) -> None:
        """Wait until the page is loaded."""
        while "Page.loadEventFired" not in self._events:
            self._record(json.loads(self._connection.recv(timeout=TIMEOUT_S)))
        self._events.clear()

    def run(self, expression: str) -> object:
        """Evaluate a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release one key."""
        text = {} if len(key) > 1 and key != "Enter" else {"text": "\r" if key == "Enter" else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Save a screenshot as PNG: the viewport, or the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        file.write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _record(self, event: dict) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))


@contextmanager
def browser_tab(profile: Path) -> Generator[Tab]:
    """Start a browser with one tab; `profile` is its own folder."""
    assert PROGRAM is not None
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    profile.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(profile)}  # Chromium leaves a lock folder in TMPDIR
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        port = _port(profile / "DevToolsActivePort", process)
        with connect(f"ws://127.0.0.1:{port}{_page(port)}", max_size=None, open_timeout=TIMEOUT_S) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        process.wait(timeout=TIMEOUT_S)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while not (file.exists() and file.read_text().count("\n") >= 1):
        assert process.poll() is None, "Chromium exited"
        assert time.monotonic() < deadline, "Chromium did not start in time"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])


def _page(port: int) -> str:
    import httpx

    targets = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT_S, trust_env=False).json()
    return "/" + next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page").split("/", 3)[3]
