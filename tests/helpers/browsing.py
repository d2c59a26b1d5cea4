"""A real headless Chromium, driven by its own protocol over a pipe: nothing is to be installed.

https://chromedevtools.github.io/devtools-protocol/; with ``--remote-debugging-pipe`` it reads
messages from descriptor 3 and writes to 4, each ended by a NUL.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WAIT_SECS = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_KEYS = {
    "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27, "Enter": 13, "Tab": 9,
}  # fmt: skip


def find_browser() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    found = (shutil.which(name) for name in _NAMES)
    return next((path for path in found if path is not None), None)


class BrowserError(Exception):
    """The browser didn't do what it was told, or not in time."""


class Browser:
    """One Chromium with an empty profile; leaving the ``with`` ends it."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="browser-")
        path = find_browser()
        if path is None:
            raise BrowserError("no chromium here")
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [path, *_OPTIONS, f"--user-data-dir={self._profile}"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, "bash", *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)  # its own session: nobody else is in it
        self._process.wait(10)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of one command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_SECS
        while True:
            found = self._receive(deadline)
            if found is None:
                raise BrowserError(f"{method}: no answer")
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return what a page has told so far."""
        while self._receive(time.monotonic()) is not None:
            pass
        return [event for event in self._events if event.get("sessionId") == session]

    def forget(self, session: str) -> None:
        """Let go of what a page has told so far."""
        self._events = [event for event in self._events if event.get("sessionId") != session]

    def await_event(self, method: str, session: str) -> None:
        """Wait until a page has told of something, since `forget`."""
        deadline = time.monotonic() + WAIT_SECS
        while not any(
            event["method"] == method and event.get("sessionId") == session
            for event in self._events
        ):
            if self._receive(deadline) is None:
                raise BrowserError(f"{method} didn't happen")

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message, None where none comes in time; events are kept."""
        while b"\0" not in self._rest:
            wait = max(0.0, deadline - time.monotonic())
            if not select.select([self._from], [], [], wait)[0]:
                return None
            data = os.read(self._from, 1 << 20)
            if not data:
                raise BrowserError(f"the browser is gone, status {self._process.poll()}")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message

    @contextlib.contextmanager
    def page(
        self, *, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False
    ) -> Iterator[Page]:
        """Give an empty page."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        if phone:
            page.call("Emulation.setTouchEmulationEnabled", enabled=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One page of a browser; clicks and keys are real input, not calls of its script."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of one command to this page."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Go to an address and wait until a report is drawn."""
        self._browser.forget(self._session)
        self.call("Page.navigate", url=url)
        self._browser.await_event("Page.loadEventFired", self._session)
        self.wait("document.documentElement.dataset.ready !== undefined")

    def eval(self, expression: str) -> Any:
        """Return the value of an expression, awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise BrowserError(json.dumps(result["exceptionDetails"])[:2000])
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_SECS
        while not self.eval(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"not in time: {expression}; {self.complaints()}")
            self.eval("new Promise((done) => setTimeout(done, 20))")

    def text(self, selector: str) -> str:
        """Return what an element shows."""
        return str(self.eval(f"document.querySelector({json.dumps(selector)}).innerText"))

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of an element, scrolled into view."""
        found = self.eval(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = one.getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        left, top, width, height = map(float, found)
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Do one thing with the mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        """Press and release the left button in the middle of an element."""
        left, top, width, height = self.box(selector)
        x, y = left + width / 2, top + height / 2
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def drag(self, selector: str, start: float, stop: float) -> None:
        """Drag the mouse over an element, between two shares of its width."""
        left, top, width, height = self.box(selector)
        y = top + height / 2
        self.mouse("mouseMoved", left + width * start, y)
        self.mouse("mousePressed", left + width * start, y, button="left", clickCount=1)
        for share in (start + (stop - start) / 2, stop):
            self.mouse("mouseMoved", left + width * share, y, button="left", buttons=1)
        self.mouse("mouseReleased", left + width * stop, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        """Press and release one key."""
        code = _KEYS.get(key) or ord(key.upper())
        text = {"text": key} if len(key) == 1 else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def complaints(self) -> list[str]:
        """Return what the page's console holds of errors and warnings, and its exceptions."""
        found = []
        for event in self._browser.events(self._session):
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(params["exceptionDetails"])[:1000])
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                    found.append(json.dumps(params["args"])[:1000])
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(params["entry"]["text"])
                case _:
                    pass
        return found

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events(self._session)
            if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is shown, or the whole page, as PNG."""
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))
