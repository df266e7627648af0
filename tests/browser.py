"""A headless Chromium through chromedriver's own protocol (W3C WebDriver): enough to open a page and ask it things."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest


class Browser:
    """One window; `errors()` is what the console complained about."""

    def __init__(self, folder, width=1200, height=900):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [shutil.which("chromedriver"), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        arguments += [f"--window-size={width},{height}", f"--user-data-dir={folder}", "--hide-scrollbars"]
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = ""
        for _ in range(100):
            try:
                self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
                return
            except urllib.error.HTTPError:
                break
            except OSError:  # chromedriver is not up yet
                time.sleep(0.1)
        self._process.kill()
        pytest.skip("Chromium does not start here")

    def _call(self, verb, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"}, method=verb)
        with urllib.request.urlopen(request, timeout=180) as answer:
            return json.load(answer)["value"]

    def _do(self, path, body):
        return self._call("POST", f"/session/{self._session}/{path}", body)

    def open(self, path):
        self._do("url", {"url": path.absolute().as_uri()})
        assert self.settled("return document.body.dataset.ready", "yes") == "yes", self.errors()

    def run(self, script):
        return self._do("execute/sync", {"script": script, "args": []})

    def settled(self, script, value):
        """What the script returns once it is `value`, else after a minute: events reach the page a frame later."""
        for _ in range(1200):
            if (last := self.run(script)) == value:
                break
            time.sleep(0.05)
        return last

    def phone(self):
        """The page on a narrow screen (a headless window is at least 500 wide)."""
        screen = {"width": 380, "height": 800, "deviceScaleFactor": 2, "mobile": True}
        self._do("goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": screen})

    def dark(self):
        """The page for somebody who prefers the dark."""
        wish = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        self._do("goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": wish})

    def errors(self):
        return [e["message"] for e in self._do("se/log", {"type": "browser"}) if e["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path):
        found = self._call("GET", f"/session/{self._session}/screenshot")
        path.write_bytes(base64.b64decode(found))

    def close(self):
        try:
            self._call("DELETE", f"/session/{self._session}")
        finally:
            self._process.terminate()
            self._process.wait(10)


def needs_chromium(function):
    """Mark a test that is skipped where Debian's chromium and chromium-driver are not installed."""
    there = shutil.which("chromium") and shutil.which("chromedriver")
    return pytest.mark.skipif(not there, reason="chromium and chromium-driver are not installed")(function)
