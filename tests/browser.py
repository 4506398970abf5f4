"""A page in headless Chromium, in a frame of the width of a phone or a desktop."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--window-size=1400,900")
SHOW = "f.contentDocument.documentElement.scrollWidth + ' of ' + f.contentWindow.innerWidth"


@dataclass(frozen=True)
class Seen:
    """How wide a page's content and its window are, in pixels, and what the browser logged to its console."""

    content: int
    window: int
    console: list[str]


def look_at(page: Path, width: int, folder: Path) -> Seen:
    """Returns what Chromium shows of a page in a window of ``width`` pixels; ``folder`` receives the frame.

    A window of Chromium is at least 500 pixels wide, so the page is shown in a frame of the width.
    """
    frame = folder / f"frame_{width}.html"
    frame.write_text(
        f'<iframe id="f" src="{page.as_uri()}" style="width:{width}px;height:800px;border:0"></iframe>'
        f"<script>f.onload = () => {{ document.title = {SHOW} }}</script>",
        encoding="utf-8",
    )
    # Each file is an origin of its own, so the frame may look into the page only without this policy.
    more = ("--disable-web-security", "--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom")
    command = [str(BROWSER), *OPTIONS, *more, frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert found is not None, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(int(found[1]), int(found[2]), console)
