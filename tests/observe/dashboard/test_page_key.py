"""The dashboard from another machine: it asks for an operator's key, keeps it for the tab, and shows it to nobody."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.cluster import wait_for
from tests.observe.dashboard.browser import WAIT_MS, a_browser

pytestmark = pytest.mark.slow

CLIENT, OPERATOR = "sk-of-a-client-0123456789", "op-of-an-operator-0123456789"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    for name, key in (("clients", CLIENT), ("operators", OPERATOR)):
        (tmp_path / name).write_text(key)
    words = [sys.executable, "-m", "kvbaton.cli.main", "router", "--port", "0", "--json"]
    words += ["--api-key-file", str(tmp_path / "clients"), "--operator-key-file", str(tmp_path / "operators")]
    words += ["--prefill-url", "http://127.0.0.1:9", "--decode-url", "http://127.0.0.1:10"]
    log = tmp_path / "router.log"
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: log.read_text().endswith("\n"), 60.0, log)
        yield json.loads(log.read_text())["url"]
    finally:
        process.terminate()
        process.wait(60)


def test_a_browser_elsewhere_shows_an_operators_key(url: str) -> None:
    with a_browser() as browser, contextlib.ExitStack() as stack:
        context = browser.new_context(extra_http_headers={"X-Forwarded-For": "192.0.2.1"})
        stack.callback(context.close)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/dashboard")
        note, field = page.locator("#key-note"), page.locator("#key-text")
        expect(note).to_contain_text("operators only")
        expect(page.locator("#banner")).to_be_hidden()
        for typed, said in (("short", "8 to 512"), (CLIENT, "does not take this key")):
            field.fill(typed)
            field.press("Enter")
            expect(note).to_contain_text(said)
            page.locator("#retry").dispatch_event("click")  # another refusal says nothing else
            expect(note).to_contain_text(said)
        field.fill(f" {OPERATOR}\n")
        page.get_by_role("button", name="Open", exact=True).click()
        expect(page.locator("#workers")).to_contain_text("prefill0")
        expect(page.locator("#key")).to_be_hidden()
        page.locator("#recent").click()
        expect(page.locator("#drawer-body")).not_to_contain_text("403")
        page.reload()
        expect(page.locator("#workers")).to_contain_text("prefill0")
        expect(page.locator("#key")).to_be_hidden()
        assert not [each for each in asked if OPERATOR in each or not each.startswith(url)]
        assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
        other = context.new_page()  # another tab has a storage of its own
        other.goto(f"{url}/dashboard")
        expect(other.locator("#key-note")).to_contain_text("operators only")
