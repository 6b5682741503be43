"""Chromium without a window, driven by the DevTools protocol over a pair of pipes: no port and no library.

Messages are JSON objects that end with a zero byte. Chromium reads them from its file descriptor 3 and writes to 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 120
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in enumerate(ends, 3):
    os.dup2(end, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Puts two pipes at the descriptors that Chromium expects."""


def program() -> str | None:
    """Return the path of Chromium, or None if this host has none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page in Chromium, which can reach files but no network."""

    def __init__(self, command: str, profile: Path):
        below, self._write = os.pipe()
        self._read, above = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", f"--user-data-dir={profile}"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        flags += ["--disable-sync", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to start as root
        start = [sys.executable, "-I", "-S", "-c", START, str(below), str(above)]
        self._log = (profile.parent / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            [*start, command, *flags, "about:blank"],
            pass_fds=(below, above),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(below)
        os.close(above)
        self._last, self._rest, self._session = 0, b"", ""
        self.complaints: list[str] = []
        """Errors of the page's console, exceptions of its scripts, and files that did not load."""
        self.requests: list[str] = []
        """Addresses that the page has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the browser, its pipes and its log."""
        try:
            self._session = ""
            self.call("Browser.close")
            self._process.wait(timeout=PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._read)
            os.close(self._write)
            self._log.close()

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._last:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Load a page and wait until its scripts and pictures have loaded."""
        self.complaints, self.requests = [], []
        failed = self.call("Page.navigate", url=address).get("errorText")
        if failed:
            raise RuntimeError(f"{address}: {failed}")
        self.wait(f"document.readyState == 'complete' && location.href == {json.dumps(address)}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                if value := self.evaluate(expression):
                    return value
            except RuntimeError:  # the page that was asked is gone, and the next one is not there yet
                pass
            time.sleep(0.05)
        raise TimeoutError(f"after {PATIENCE_S} s not true: {expression}; complaints: {self.complaints}")

    def resize(self, width: int, height: int) -> None:
        """Give the page the size of another screen."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self, path: Path) -> None:
        """Write what the page shows to a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self) -> dict[str, Any]:
        """Return the next message, and note what it reports."""
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                state = "ended" if ready else f"sent nothing for {PATIENCE_S} s"
                raise RuntimeError(
                    f"Chromium {state}: {Path(self._log.name).read_text(errors='replace')[-2000:]}"
                )
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        if event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.complaints.append(str(about["args"]))
        if event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        if event == "Network.loadingFailed" and not about.get("canceled"):
            self.complaints.append(f"a file did not load: {about['errorText']}")
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
