"""The dashboard in a real Chromium, on a live cluster with two P and two D: its figures, and a P that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.cluster import Up, up, wait_for
from tests.observe.dashboard import truth
from tests.observe.dashboard.browser import a_browser, opened, shoot
from tests.observe.dashboard.load import load

pytestmark = pytest.mark.slow

DEADLINE_S = 40.0
PICTURE_MS = 45_000
"""A picture for the documentation shows lines that have become some."""
PICTURE = (1280, 900)
"""Every worker's row is on it."""
MODES = ("pull", "stream", "push")
MANY = [MODES[number % 3] for number in range(64)]
BURST = 16
PAUSE_S = 0.25
"""A dot is seen for longer: with three clients there are always some."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up"), "--prefill", "2", "--decode", "2") as found:
        yield found


def asked(cluster: Up, path: str, **query: str) -> Any:
    return truth.asked(f"{cluster.url}{path}", **query)


def test_figures_are_those_of_flights_and_metrics_under_load_after_it_and_with_mistakes(
    cluster: Up, browser: Browser
) -> None:
    with opened(browser, cluster.url) as visit:
        page = visit.page
        expect(page.locator("#empty code")).to_contain_text("curl -N")  # nothing yet: it says what to do
        with truth.Sampler(cluster.url).running() as sampler:
            with load(cluster.url, MANY, requests=2, words=20) as clients:
                holds_under_load(page, sampler)
                rates_hold(page, sampler)
            assert clients.answered >= len(MANY)
            wait_for(lambda: page_rests(page, sampler), DEADLINE_S)
        holds_after_load(page, cluster)
        refused = mistakes(cluster)
        holds_with_mistakes(page, cluster, refused)
        visit.check()


def holds_under_load(page: Page, sampler: truth.Sampler) -> None:
    """Every figure that changes was lately what its process said, in one state of the page."""
    busy: set[str] = set()

    def held() -> bool:
        shown = {("router", "in_flight"): truth.number(truth.tile(page, "flight"))}
        shown |= {(worker, name): cell for worker, row in truth.rows(page).items() for name, cell in row.items()}
        shown |= {(worker, "cache"): share for worker, share in truth.cache_shares(page).items()}
        busy.update(name for (_, name), value in shown.items() if value)
        allowed = all(sampler.allows(place, name, value) for (place, name), value in shown.items())
        return allowed and {"in_flight", "waiting"} <= busy

    wait_for(held, DEADLINE_S)
    expect(page.locator('[data-stage="claim"]')).not_to_have_attribute("data-count", "0")  # not blank, though busy


def rates_hold(page: Page, sampler: truth.Sampler) -> None:
    """Each is the rate of ten seconds, once the page has been there for so long, and of something that was counted."""

    def held() -> bool:
        shown = {name: truth.per_second(truth.tile(page, name)) for name in truth.RATES}
        return all(value and sampler.allows_rate(name, value) for name, value in shown.items())

    wait_for(held, DEADLINE_S)


def page_rests(page: Page, sampler: truth.Sampler) -> bool:
    idle = all(value == 0 for row in truth.rows(page).values() for value in row.values())
    return idle and truth.number(truth.tile(page, "flight")) == 0 and not any(sampler.last("d0").values())


def holds_after_load(page: Page, cluster: Up) -> None:
    assert truth.expected(cluster.url).ended
    truth.agree(page, cluster.url, DEADLINE_S)
    flights = asked(cluster, "/flights", last="200")["journeys"]
    chunks = sum(each.get("chunks", 0) for each in flights)
    assert truth.metrics(cluster.url)["kvbaton_router_token_chunks_total"] == chunks >= 8 * len(MANY)
    assert page.locator("#failures button").count() == len([each for each in flights if each.get("failed")])


def mistakes(cluster: Up) -> list[str]:
    """Eight requests that P refuses, in all modes; returns their ids."""
    found = []
    for number in range(8):
        body = {"prompt": "x", "model": "nobody"} if number % 2 else {"prompt": "x" * 5000, "max_tokens": 4}
        headers = {"Content-Type": "application/json", "x-kvbaton-mode": MODES[number % 3]}
        question = urllib.request.Request(f"{cluster.url}/v1/completions", json.dumps(body).encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(question, timeout=30)
        error = json.load(refused.value)["error"]
        assert (refused.value.code, error["code"]) == (
            (404, "model_not_found") if number % 2 else (400, "invalid_value")
        )
        assert error["request_id"] == refused.value.headers["x-request-id"]
        found.append(error["request_id"])
    return found


def holds_with_mistakes(page: Page, cluster: Up, refused: list[str]) -> None:
    told = truth.metrics(cluster.url)['kvbaton_router_responses_total{status="4xx"}']
    expect(page.locator('[data-tile="retries"] .sub')).to_have_text(f"{told:.0f} client errors")
    assert told == len(refused)
    truth.agree(page, cluster.url, DEADLINE_S)
    failed = asked(cluster, "/flights", last="50", failed="1")["journeys"]
    assert not {each["request"] for each in failed} & set(refused)
    assert page.locator("#failures button").count() == len(failed)
    for name in refused:
        (journey,) = asked(cluster, "/flights", id=name)["journeys"]
        assert journey["mistake"] and not journey.get("failed")
        # In stream and push both are asked at once: P refuses it, or D does sooner.
        assert "refused the request before a handoff began" in [side["why"] for side in journey["missing"]]


def test_a_live_cluster_is_seen_and_a_killed_p_is_explained(cluster: Up, browser: Browser, tmp_path: Path) -> None:
    with opened(browser, cluster.url, size=PICTURE) as visit:
        page = visit.page
        with load(cluster.url, MODES, pause_s=PAUSE_S):
            sees_nodes_and_links(page)
            sees_handoffs_move(page)
            sees_stages_and_figures(page)
            if os.environ.get("KVBATON_SCREENSHOTS"):
                page.wait_for_timeout(PICTURE_MS)
            sees_several_handoffs(page)
            shoot(page, tmp_path, "dashboard-light")
            find = kill_under_load(cluster, "p1")
            opens_its_timeline_by_keyboard(page, find)
            shoot(page, tmp_path, "dashboard-timeline")
            page.keyboard.press("Escape")
            expect(page.locator("#drawer")).not_to_be_visible()
            assert page.evaluate("document.activeElement.dataset.find") == find  # where it was before
            searches(page, find)
            expect(page.locator('[data-node="p1"]')).to_have_attribute("data-state", "gone", timeout=DEADLINE_S * 1e3)
            looks_elsewhere(browser, cluster, tmp_path)
        assert visit.fits()
        visit.check()


def sees_nodes_and_links(page: Page) -> None:
    for name in ("p0", "p1", "d0", "d1"):
        expect(page.locator(f'[data-node="{name}"]')).to_have_attribute("data-state", "ready")
    assert page.locator(".node[data-role]").count() == 4
    expect(page.locator(".link")).to_have_count(4)
    for link in page.locator(".link").all():
        expect(link).to_have_attribute("data-transport", "shm")
    expect(page.locator(".label").first).to_contain_text("shm")
    expect(page.locator("#empty")).to_be_hidden()


def sees_handoffs_move(page: Page) -> None:
    """Dots are there, and the same dot comes further along its link."""
    page.wait_for_selector(".dot:not([display])", state="attached")
    moved = """async () => {
        const at = (dot) => dot.hasAttribute("display") ? null : dot.getAttribute("transform");
        const until = performance.now() + 10000;
        while (performance.now() < until) {
            const before = new Map([...document.querySelectorAll(".dot")].map((dot) => [dot, at(dot)]));
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            const x = (text) => Number(/translate\\(([-0-9.]+)/.exec(text)[1]);
            for (const [dot, was] of before) {
                const now = at(dot);
                if (was !== null && now !== null && x(now) > x(was)) return true;
            }
        }
        return false;
    }"""
    assert page.evaluate(moved)
    assert page.locator(".dot").count() <= 60


def sees_several_handoffs(page: Page) -> None:
    expect(page.locator(".dot:not([display])").nth(2)).to_be_attached()  # as many as clients ask, however slow it is


def sees_stages_and_figures(page: Page) -> None:
    for stage in ("claim", "queue", "first_byte", "copy", "commit", "deliver"):
        row = page.locator(f'[data-stage="{stage}"]')
        expect(row).not_to_have_attribute("data-count", "0")
        expect(row.locator(".times")).to_contain_text("p95")
    for tile in ("handoffs", "delivered", "ttft", "bytes"):
        expect(page.locator(f'[data-tile="{tile}"] .value')).not_to_have_text("–")
    expect(page.locator('[data-tile="handoffs"] .value')).not_to_have_text("0")


def kill_under_load(cluster: Up, worker: str) -> str:
    """Stop it, give it prompts for which D waits as well, and kill it; returns a handoff that failed by this."""
    pid = cluster.pid(worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", DEADLINE_S)
        with load(cluster.url, ["stream"] * BURST, requests=1):
            wait_for(lambda: waiting_for(cluster, worker), DEADLINE_S)
            os.kill(pid, signal.SIGKILL)
            return str(wait_for(lambda: failed_at(cluster, worker), DEADLINE_S))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def waiting_for(cluster: Up, worker: str) -> bool:
    """Whether a request waits for this worker, and D with it. Of a burst most may be elsewhere: the router sends less
    to a worker that answers nothing."""
    journeys = asked(cluster, "/flights", last="100")["journeys"]
    waiting = [each for each in journeys if not each.get("end") and names(each) == worker and each["mode"] == "stream"]
    # A question for one handoff is asked of D, too.
    found = [each for one in waiting[:2] for each in asked(cluster, "/flights", id=one["handoff"])["journeys"]]
    return any(lane["seat"] == "decode" for each in found for lane in each["lanes"])


def failed_at(cluster: Up, worker: str) -> str:
    """A handoff of this worker that failed and of which router and D told; "" if there is none yet."""
    for journey in asked(cluster, "/flights", last="30", failed="1")["journeys"]:
        if names(journey) == worker and {lane["seat"] for lane in journey["lanes"]} >= {"router", "decode"}:
            return str(journey["handoff"])
    return ""


def names(journey: Any) -> str:
    """The P of which nothing was heard; "" if there is none."""
    return next((side["worker"] for side in journey.get("missing", ()) if side["seat"] == "prefill"), "")


def opens_its_timeline_by_keyboard(page: Page, find: str) -> None:
    button = page.locator(f'#failures button[data-find="{find}"]')
    expect(button).to_be_attached(timeout=DEADLINE_S * 1e3)
    page.locator("#failures button[tabindex='0']").focus()
    page.keyboard.press("Home")
    deadline = time.monotonic() + DEADLINE_S
    while page.evaluate("document.activeElement.dataset.find") != find:
        assert time.monotonic() < deadline
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    drawer = page.locator("#drawer")
    for lane in ("router", "decode"):
        expect(drawer.locator(f'[data-lane="{lane}"]')).to_be_attached()
    verdict = drawer.locator(".verdict .reason")
    wait_for(  # the list is joined once in a while: what D said of it may come there after the router's reason
        lambda: verdict.inner_text() == (button.get_attribute("data-reason") or "").replace("_", " "), DEADLINE_S
    )
    expect(drawer.locator(".ids")).to_contain_text(find)
    expect(drawer.locator(".moments tbody tr").first).to_be_visible()


def searches(page: Page, find: str) -> None:
    page.keyboard.press("/")
    page.keyboard.type(find)
    page.keyboard.press("Enter")
    expect(page.locator("#drawer .ids")).to_contain_text(find)
    page.keyboard.press("Escape")
    page.locator("#recent").click()
    expect(page.locator("#drawer .pick")).not_to_have_count(0)
    expect(page.locator("#drawer .lane").first).to_be_attached()
    page.keyboard.press("Escape")


def looks_elsewhere(browser: Browser, cluster: Up, tmp_path: Path) -> None:
    with opened(browser, cluster.url, size=PICTURE, scheme="dark") as visit:
        sees_several_handoffs(visit.page)
        shoot(visit.page, tmp_path, "dashboard-dark")
        visit.check()
    with opened(browser, cluster.url, size=(600, 900)) as visit:
        visit.page.wait_for_selector('[data-node="d0"]')
        assert visit.fits()
        visit.check()
