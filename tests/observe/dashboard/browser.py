"""A real Chromium without a window, and a page whose every word and request is noted."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

WAIT_MS = 15_000
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-device-scale-factor=1")
LAPTOP = (1280, 800)
TOOLS = str(Path(__file__).parents[3] / ".tools" / "bin")


def chromium() -> str:
    """Debian's, or the one that KVBATON_CHROMIUM names; without it the test fails, and says what to do."""
    place = os.environ.get("KVBATON_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium", path=TOOLS)
    if place is None:
        pytest.fail("no chromium here; run: tools/system_packages.sh chromium (or set KVBATON_CHROMIUM)")
    return place


@contextlib.contextmanager
def a_browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS), headless=True)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """What a page said and asked for."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing went wrong, and nobody else was asked for anything."""
        assert self.errors == []
        assert self.failed == []
        assert {f"{each.scheme}://{each.netloc}" for each in map(urlsplit, self.asked)} == {self.origin}

    def reload(self) -> None:
        """Ask for the page again; what was being fetched for the old one is cut off by this."""
        before = len(self.failed)
        self.page.reload()
        self.failed[before:] = [each for each in self.failed[before:] if "net::ERR_ABORTED" not in each]

    def fits(self) -> bool:
        """Whether nothing has to be scrolled sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = LAPTOP, scheme: str = "light", motion: str = "no-preference"
) -> Iterator[Visit]:
    """The page of a router at `url`, in a profile of its own."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce" if motion == "reduce" else "no-preference",
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    seen = Visit(page, url)
    page.on("console", lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("requestfailed", lambda request: seen.failed.append(f"{request.url} {request.failure}"))
    page.on("response", lambda got: seen.failed.append(f"{got.url} {got.status}") if got.status >= 400 else None)
    page.on("request", lambda request: seen.asked.append(request.url))
    try:
        page.goto(f"{url}/dashboard")
        yield seen
    finally:
        context.close()


def shoot(page: Page, directory: Path, name: str) -> Path:
    """A picture, kept small; where KVBATON_SCREENSHOTS names a folder, there."""
    folder = Path(os.environ.get("KVBATON_SCREENSHOTS") or directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    page.screenshot(path=str(path), animations="disabled", type="png")
    return path
