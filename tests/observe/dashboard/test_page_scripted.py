"""The page on states that a test writes: a thousand handoffs a second, hostile names, a router that goes away."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from kvbaton.observe.dashboard import state
from kvbaton.observe.dashboard.pulse import Failure, Figures, MovingHandoff, Pulse, Scene, SeenHandoff, Trouble
from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment
from kvbaton.observe.flight.journey import join
from tests.e2e.cluster import wait_for
from tests.observe.dashboard.browser import a_browser, opened
from tests.observe.dashboard.scripted import Script, serving

pytestmark = pytest.mark.slow

NODES_MAX = 4000
UPDATES_S = 30.0
HOSTILE = '<img src=x onerror="window.pwned=1">\'&<script>window.pwned=1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


def small(**changes: Any) -> Scene:
    """Two workers and a link."""
    workers = (SeenHandoff("p0", "prefill", "ready"), SeenHandoff("d0", "decode", "ready", links={"p0": "shm"}))
    return Scene(**{"at": time.time(), "version": "1", "mode": "pull", "workers": workers, **changes})


def busy(pulse: Pulse | None = None) -> Callable[[Scene], bytes]:
    """Encodes scenes of a cluster that has seen handoffs."""
    pulse = pulse or Pulse()
    pulse.ended(time.time() - 4, 10, 0)
    return lambda scene: state.encode(state.build(scene, pulse))


def journey(handoff: str = "h1", request: str = "r1", end: str = "claim_timeout", detail: str = "") -> Any:
    at = time.time() - 5
    steps = [("received", 0.0), ("chosen", 0.001), ("prefill_sent", 0.002), ("prefill_answered", 0.03)]
    router = Flight(
        FlightSeat.ROUTER,
        "router",
        handoff=handoff,
        request=request,
        peers=("p0", "d0"),
        mode="pull",
        moments=tuple(Moment(step, at + after) for step, after in [*steps, ("decode_sent", 0.031), ("ended", 5.1)]),
        end="ok",
    )
    moments = (Moment("asked", at + 0.032), Moment("claimed", at + 0.033), Moment("ended", at + 5.0, detail))
    decode = Flight(
        FlightSeat.DECODE,
        "d0",
        handoff=handoff,
        request=request,
        peers=("p0",),
        moments=moments,
        end=end,
        detail=detail,
    )
    return msgspec.to_builtins(join([router, decode]))


def failures(count: int) -> list[Failure]:
    return [Failure(time.time() - n, "claim_timeout", f"h{n}", f"h{n}", f"r{n}", "p0", "d0") for n in range(count)]


def test_a_thousand_handoffs_a_second_leave_the_page_small(browser: Browser) -> None:
    """64 workers, more links than are drawn, 1,000 handoffs a second: bytes, nodes and dots are bounded, and level."""
    workers = [SeenHandoff(f"p{n}", "prefill", "ready", gauges={"pins": 5.0, "blocks": 512.0}) for n in range(250)]
    links = {f"p{n}": "nixl" for n in range(40)}
    workers += [SeenHandoff(f"d{n}", "decode", "ready", rates={"bytes_total": 1e9}, links=links) for n in range(250)]
    pulse = Pulse()
    numbers = itertools.count(1)

    def thousand() -> bytes:
        now = time.time()
        pulse.ended(now - 2, 1000, 3)
        pulse.first_byte(now - 2, 0.05)
        ended = [
            MovingHandoff(next(numbers), f"p{n % 16}", f"d{n % 16}", end="ok", failed=n % 90 == 0) for n in range(1000)
        ]
        waiting = [MovingHandoff(0, f"p{n % 32}", "d1", stage="handoff", key=f"k{n}") for n in range(1000)]
        shown = failures(500)
        pairs = {(f"p{n}", f"d{n % 32}"): (10, 100) for n in range(32)}
        scene = Scene(at=now, workers=workers, pairs=pairs, ended=ended, under_way=waiting, failures=shown)
        return state.encode(state.build(scene, pulse))

    script = Script(thousand)
    with serving(script), opened(browser, script.url) as visit:
        page = visit.page
        seen = []
        for update in (2, 4, 6):
            wait_for(lambda update=update: len(script.state_bytes) > update, UPDATES_S)
            seen.append(page.evaluate("document.querySelectorAll('*').length"))
            assert page.locator(".dot").count() <= 60
        assert max(seen) <= NODES_MAX
        assert max(seen) - min(seen) <= 60  # dots that were made meanwhile
        assert page.locator(".node[data-role]").count() == 64
        assert page.locator(".link").count() == 64
        expect(page.locator("#workers-note")).to_contain_text("436 not shown")
        expect(page.locator("#legend")).to_contain_text("a dot stands for about")
        assert len(script.state_bytes) >= 6
        assert max(script.state_bytes) <= state.STATE_BYTES_MAX
        assert visit.fits()
        visit.check()


def test_what_others_name_things_is_shown_as_text(browser: Browser) -> None:
    workers = [
        SeenHandoff(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 1.0, note=HOSTILE),
        SeenHandoff("d0", "decode", "ready", links={HOSTILE: HOSTILE}),
    ]
    failed = [Failure(time.time(), HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, "", HOSTILE)]
    scene = small(workers=workers, failures=failed, version=HOSTILE, mode=HOSTILE, pairs={(HOSTILE, "d0"): (1, 1)})
    encode = busy()
    told = [journey(HOSTILE, HOSTILE, HOSTILE, HOSTILE)] * 2
    script = Script(lambda: encode(scene), lambda _: told)
    with serving(script), opened(browser, script.url) as visit:
        page = visit.page
        expect(page.locator("#workers tbody th").first).to_have_text(HOSTILE[:64])
        page.locator("#failures button").click()
        expect(page.locator("#drawer .ids code").first).to_have_text(HOSTILE)
        assert page.evaluate("window.pwned") is None
        assert page.locator("img").count() == 0
        assert page.locator("body script").count() == 0
        assert page.locator("#drawer .command").count() == 0  # no command is made of such an id
        visit.check()


def test_a_router_that_goes_away_is_told_of_and_found_again(browser: Browser) -> None:
    encode = busy()
    script = Script(lambda: encode(small()))
    with serving(script), opened(browser, script.url) as visit:
        page = visit.page
        expect(page.locator('[data-node="p0"]')).to_be_visible()
        script.refuse = True
        expect(page.locator("#banner")).to_be_visible()
        expect(page.locator("#banner-text")).to_contain_text("No answer from the router")
        assert page.locator("body").get_attribute("data-stale") is not None
        expect(page.locator('[data-node="p0"]')).to_be_visible()  # what was last known
        page.evaluate("document.getElementById('retry').click()")  # however far the next try is
        script.refuse = False
        expect(page.locator("#banner")).to_be_hidden()
        assert page.locator("body").get_attribute("data-stale") is None


def test_trouble_is_in_a_banner_and_answers_are_told_by_their_status(browser: Browser) -> None:
    pulse = Pulse()
    pulse.counted(time.time() - 8, time.time(), {"2xx": 80, "4xx": 8, "429": 8, "5xx": 2586})
    shown = [Trouble("Degraded: no prefill worker", is_down=False)]
    script = Script(lambda: state.encode(state.build(small(trouble=shown[0], own=Figures(2, 1)), pulse)))
    with serving(script), opened(browser, script.url) as visit:
        page, banner = visit.page, visit.page.locator("#trouble")
        expect(banner).to_have_text("Degraded: no prefill worker")
        assert banner.get_attribute("data-down") is None
        tiles = {name: page.locator(f'[data-tile="{name}"]') for name in ("requests", "errors", "flight")}
        expect(tiles["errors"].locator(".value")).to_have_text("2,586")
        expect(tiles["errors"]).to_have_attribute("data-bad", "")
        expect(tiles["requests"].locator(".sub")).to_contain_text("· 4xx ")
        expect(tiles["requests"].locator(".sub")).not_to_contain_text("gone")
        expect(tiles["flight"].locator(".sub")).to_have_text("1 waiting for a first byte")
        shown[0] = Trouble("Requests are answered 503", is_down=True)
        expect(banner).to_have_attribute("data-down", "")
        script.state = lambda: state.encode(state.build(small(), pulse))
        expect(banner).to_be_hidden()
        visit.check()


def test_a_page_without_workers_says_how_to_start_some(browser: Browser) -> None:
    script = Script(lambda: state.encode(state.build(small(workers=()), Pulse())))
    with serving(script), opened(browser, script.url) as visit:
        expect(visit.page.locator("#empty")).to_contain_text("No workers yet")
        expect(visit.page.locator("#empty code")).to_contain_text("kvbaton up")
        expect(visit.page.locator("#workers-none")).to_be_visible()
        visit.check()


def test_everything_can_be_reached_with_the_keyboard(browser: Browser) -> None:
    encode = busy()
    shown = failures(5)
    script = Script(lambda: encode(small(failures=shown)), lambda asked: [journey(asked.get("id", "h0"))])
    with serving(script), opened(browser, script.url) as visit:
        page = visit.page
        expect(page.locator("#failures button")).to_have_count(5)
        page.keyboard.press("Tab")
        assert focused(page) == "A skip"
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        page.keyboard.press("/")
        expect(page.locator("#find")).to_be_focused()
        page.keyboard.type("h3/")  # here a slash is a slash
        assert page.locator("#find").input_value() == "h3/"
        page.keyboard.press("Enter")
        expect(page.locator("#drawer")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#find")).to_be_focused()
        visited = tabbed(page)
        assert visited[:3] == ["BUTTON plain", "A plain", "BUTTON plain"]
        assert visited.count("BUTTON failure") == 1  # one of the list; arrows go on from there
        page.locator('#failures button[tabindex="0"]').focus()
        page.keyboard.press("End")
        expect(page.locator('#failures button[data-find="h4"]')).to_be_focused()
        page.keyboard.press("ArrowUp")
        expect(page.locator('#failures button[data-find="h3"]')).to_be_focused()
        width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width >= 2  # what has the focus is seen
        page.keyboard.press("Space")
        expect(page.locator("#drawer .verdict .reason")).to_have_text("claim timeout")
        expect(page.locator("#drawer")).to_contain_text("P did not answer the claim in time.")
        inside = "document.getElementById('drawer').contains(document.activeElement)"
        for _ in range(12):  # the page behind is out of reach
            page.keyboard.press("Tab")
            assert page.evaluate(f"{inside} || document.activeElement === document.body")
        page.keyboard.press("Escape")
        expect(page.locator('#failures button[data-find="h3"]')).to_be_focused()
        visit.check()


def focused(page: Page) -> str:
    return str(page.evaluate("`${document.activeElement.tagName} ${document.activeElement.className}`"))


def tabbed(page: Page) -> list[str]:
    """What Tab comes to, from the search field on."""
    found = []
    for _ in range(12):
        page.keyboard.press("Tab")
        found.append(focused(page))
    return found


def test_the_focus_stays_on_a_failure_while_newer_ones_come(browser: Browser) -> None:
    encode = busy()
    shown = failures(3)
    script = Script(lambda: encode(small(failures=shown)))
    with serving(script), opened(browser, script.url) as visit:
        page = visit.page
        expect(page.locator("#failures button")).to_have_count(3)
        page.locator('#failures button[data-find="h1"]').focus()
        shown[:] = [Failure(time.time(), "stale", "new", "new", "new"), *shown[:2]]
        expect(page.locator('#failures button[data-find="new"]')).to_be_attached()
        assert page.evaluate("document.activeElement.dataset.find") == "h1"
        order = page.locator("#failures button").evaluate_all("each => each.map((one) => one.dataset.find)")
        assert order == ["new", "h0", "h1"]
        told = msgspec.structs.replace(
            shown[2], at=shown[2].at - 0.5, reason="peer_gone", detail="D heard of it before"
        )
        shown[2] = told
        expect(page.locator('#failures button[data-find="h1"]')).to_have_attribute("data-reason", "peer_gone")
        assert page.evaluate("document.activeElement.dataset.find") == "h1", "another side has told of it"


def test_the_theme_that_was_chosen_is_remembered(browser: Browser) -> None:
    encode = busy()
    script = Script(lambda: encode(small()))
    with serving(script), opened(browser, script.url, scheme="dark") as visit:
        page = visit.page
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text("Theme: light")
        light = page.evaluate(ground)
        assert light != dark
        visit.reload()
        expect(page.locator("#theme")).to_have_text("Theme: light")
        assert page.evaluate(ground) == light
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text("Theme: dark")
        assert page.evaluate(ground) == dark
        visit.check()


def test_who_wants_less_motion_gets_dots_that_stand(browser: Browser) -> None:
    numbers = itertools.count(1)
    encode = busy()

    def moving() -> bytes:
        ended = [MovingHandoff(next(numbers), "p0", "d0", end="ok") for _ in range(20)]
        return encode(small(ended=ended, under_way=[MovingHandoff(0, "p0", "d0", stage="handoff", key="k")]))

    script = Script(moving)
    with serving(script), opened(browser, script.url, motion="reduce") as visit:
        page = visit.page
        page.wait_for_selector(".dot:not([display])", state="attached")
        places = "[...document.querySelectorAll('.dot:not([display])')].map((dot) => dot.getAttribute('transform'))"
        before = page.evaluate(places)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        after = page.evaluate(places)
        assert sorted(before) == sorted(after)  # the same places, also if other handoffs have come to stand there
        assert 1 <= len(after) <= 60
        visit.check()


@pytest.mark.parametrize("width", [390, 600, 1000, 1280])
def test_nothing_needs_scrolling_sideways(browser: Browser, width: int) -> None:
    encode = busy()
    long = [SeenHandoff(f"prefill-worker-with-a-long-name-{n}", "prefill", "draining", heard_s=50.0) for n in range(3)]
    long += [
        SeenHandoff(f"decode-worker-with-a-long-name-{n}", "decode", "ready", links={long[0].name: "mooncake"})
        for n in (0, 1)
    ]
    failed = [Failure(time.time(), "claim_timeout", "x" * 120, "x" * 120, "y" * 120, detail="z" * 160)]
    script = Script(lambda: encode(small(workers=long, failures=failed)), lambda _: [journey("x" * 120, "y" * 120)])
    with serving(script), opened(browser, script.url, size=(width, 800)) as visit:
        page = visit.page
        expect(page.locator(".node[data-role]")).to_have_count(5)
        assert visit.fits()
        page.locator("#failures button").click()
        expect(page.locator("#drawer .lanes")).to_be_visible()
        inner = "document.getElementById('drawer-body')"
        assert page.evaluate(f"{inner}.scrollWidth <= {inner}.clientWidth")
        visit.check()
