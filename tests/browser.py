"""A page in headless Chromium: a picture of it, and what its own layout says about widths and contrast."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
    "--v=0",
]
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
FRAME = """<!doctype html><html style="color-scheme: light dark"><body>
<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<script>onload = () => document.body.replaceChildren(frames[0].document.getElementById("measured"))</script>
</body></html>"""
MEASURE = (ROOT / "tests" / "measure_page.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Chromium:
    """A browser with a profile of its own."""

    program: str
    folder: Path

    def picture(self, page: Path, target: Path, width: int, height: int, *, dark: bool = False) -> str:
        """Write a screenshot; returns what the browser logged."""
        return self._run([f"--screenshot={target}"], page, width, height, dark).stderr

    def measure(self, page: Path, width: int, *, dark: bool = False) -> dict[str, Any]:
        """What the page's layout says at a width in pixels."""
        text = POLICY.sub("", page.read_text(encoding="utf-8"))  # it would not let the ruler run
        text = text.replace("</head>", f"<script>{MEASURE}</script></head>", 1)
        frame = self.folder / "frame.html"  # a window is never as narrow as a telephone
        frame.write_text(FRAME.format(width=width, page=html.escape(text)), encoding="utf-8")
        shown = self._run(["--dump-dom"], frame, 1400, 900, dark).stdout
        found = re.search(r'<pre id="measured">(.*?)</pre>', shown, flags=re.DOTALL)
        assert found, shown[-2000:]
        told: dict[str, Any] = json.loads(html.unescape(found[1]))
        return told

    def _run(
        self, what: list[str], page: Path, width: int, height: int, dark: bool
    ) -> "subprocess.CompletedProcess[str]":
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        place = [f"--user-data-dir={self.folder / 'profile'}", f"--window-size={width},{height}", scheme]
        return subprocess.run(
            [self.program, *FLAGS, *place, *what, page.resolve().as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "HOME": str(self.folder)},
        )


def open_chromium(folder: Path) -> Chromium:
    """A browser, or a skipped test where there is none."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return Chromium(program, folder)


def console_lines(log: str) -> list[str]:
    """What a page wrote to the console, errors of loading and of its policy among them."""
    return [line for line in log.splitlines() if ":CONSOLE" in line]


def assert_readable(browser: Chromium, page: Path) -> None:
    """Nothing is loaded or logged, nothing is wider than the page, text stands out in light and dark."""
    for dark in (False, True):
        target = browser.folder / f"{page.stem}-{'dark' if dark else 'light'}.png"
        assert console_lines(browser.picture(page, target, 1280, 900, dark=dark)) == []
        for width in (1280, 420):
            told = browser.measure(page, width, dark=dark)
            assert told["width"] == width and told["texts"] > 50
            assert told["wide"] == [] and told["scroll"] == width
            assert told["loaded"] == []
            assert told["contrast"][0] >= 4.5, told["contrast"]


def keep_for_docs(picture: Path, name: str) -> None:
    """Take over a picture into docs/, where HARMOFL_WRITE_DOCS asks for it."""
    if os.environ.get("HARMOFL_WRITE_DOCS"):
        shutil.copyfile(picture, ROOT / "docs" / name)
