"""Headless Chromium through the WebDriver protocol, with nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def why_no_browser() -> str | None:
    """Say why there is none here, or None where there is one."""
    missing = [name for name in ("chromedriver", "chromium") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found (Debian: chromium, chromium-driver)" if missing else None


class Browser:
    """One window; a context manager that leaves no process behind."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        command = [str(shutil.which("chromedriver")), "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            flags = [*FLAGS, f"--user-data-dir={self._profile.name}"]
            options = {"binary": shutil.which("chromium"), "args": flags}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._base += f"/session/{made['sessionId']}"
            self.show(1200, 1000)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # it may never have begun
            self._call("DELETE", "")
        self._driver.terminate()
        self._driver.wait(20)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._profile.cleanup()

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError("chromedriver did not start")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def _devtools(self, command: str, **params: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def show(self, width: int, height: int, dark: bool = False) -> None:
        """Set the page's own size, narrower than a window may be, and whether it is dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """Run the body of a JavaScript function and return what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait for a script to return something true, and return it."""
        end = time.monotonic() + seconds
        while True:
            if found := self.run(script):
                return found
            assert time.monotonic() < end, f"never true: {script}\n{self.run('return document.body.innerText')}"
            time.sleep(0.05)

    def log(self) -> list[str]:
        """Return what the console said since the last time."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: str | Path) -> None:
        Path(path).write_bytes(base64.b64decode(self._call("GET", "/screenshot")))
