"""The dashboard in a real Chromium during an outage, before a router of two processes, beside its `/metrics`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.cluster import up, wait_for
from tests.observe.dashboard import truth
from tests.observe.dashboard.browser import a_browser, opened, shoot
from tests.observe.dashboard.load import load

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
PAUSE_S = 0.05
NARROW = (390, 1500)
PICTURE = (1280, 900)
PICTURE_MS = 45_000
"""A picture for the documentation shows lines that have become some."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


def test_an_outage_is_seen_counted_and_explained(browser: Browser, tmp_path: Path) -> None:
    """The only D is killed under load: every request is 503 then, whatever the fallback."""
    flags = ("--prefill", "1", "--decode", "1", "--router-processes", "2")
    with up(tmp_path, *flags) as cluster, opened(browser, cluster.url, size=PICTURE) as visit:
        page = visit.page
        wait_for(lambda: "ok" in truth.asked(f"{cluster.url}/health")["status"], DEADLINE_S)
        expect(page.locator("#trouble")).to_be_hidden()
        with (
            truth.Sampler(cluster.url).running() as sampler,
            load(cluster.url, ["pull", "stream"] * 3, pause_s=PAUSE_S),
        ):
            wait_for(lambda: holds(page, sampler, "tokens"), DEADLINE_S)
            linger(page, 1.0)
            os.kill(cluster.pid("d0"), signal.SIGKILL)
            banner = page.locator("#trouble[data-down]")
            expect(banner).to_contain_text("Requests are answered 503", timeout=DEADLINE_S * 1e3)
            expect(banner).to_contain_text("no decode worker", timeout=DEADLINE_S * 1e3)
            expect(page.locator('[data-tile="errors"][data-bad]')).to_be_visible()
            wait_for(lambda: holds(page, sampler, "errors"), DEADLINE_S)
            linger(page, 0.2)
            shoot(page, tmp_path, "dashboard-outage")
            with opened(browser, cluster.url, size=NARROW, scheme="dark") as narrow:
                expect(narrow.page.locator("#trouble")).to_be_visible()
                assert narrow.fits()
                shoot(narrow.page, tmp_path, "dashboard-narrow")
                narrow.check()
        wait_for(lambda: lines_hold(cluster.url), DEADLINE_S)
        visit.check()


def linger(page: Page, share: float) -> None:
    if os.environ.get("KVBATON_SCREENSHOTS"):
        page.wait_for_timeout(PICTURE_MS * share)


def holds(page: Page, sampler: truth.Sampler, name: str) -> bool:
    """Whether a rate on the page is what the router counted, and something."""
    shown = truth.per_second(truth.tile(page, name, "sub" if name == "errors" else "value"))
    return shown > 0 and sampler.allows_rate(name, shown)


def lines_hold(url: str) -> bool:
    """Whether all that was counted stands under the lines of the last three minutes, and nothing else does."""
    lines, found = truth.asked(f"{url}/dashboard/state")["history"], truth.metrics(url)
    wanted = {
        "tokens": found["kvbaton_router_token_chunks_total"],
        "errors": found['kvbaton_router_responses_total{status="5xx"}'],
        "requests": found["kvbaton_router_responses_total"],
    }
    under = {name: lines["step_s"] * sum(filter(None, lines[name])) for name in wanted}
    return under == pytest.approx(wanted, rel=0.02)
