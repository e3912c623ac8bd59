"""The page's files, their headers, and who is shown them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib import resources
from itertools import product
from urllib.parse import urljoin

import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import Answer, Request
from kvbaton.observe.dashboard.state import FILES, HEADERS, REASONS, ROOT, STATE, fixed_pages
from kvbaton.protocol.errors import Reason
from kvbaton.router.app import Router, router_app
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.router_settings import OperatorPages, RouterSettings
from kvbaton.router.workers.directory import StaticDirectory

FOLDER = resources.files("kvbaton.observe.dashboard") / "page"
SCRIPTS = {name: (FOLDER / name).read_text() for name in FILES.values() if name.endswith(".js")}
HTML = (FOLDER / "index.html").read_text()
CSS = (FOLDER / "style.css").read_text()
ALLOWED = {"http://www.w3.org/2000/svg"}
NEEDED = 4.5


def test_every_file_of_the_folder_is_served_and_none_else() -> None:
    assert {each.name for each in FOLDER.iterdir()} == set(FILES.values())
    assert set(fixed_pages()) == {*FILES, REASONS}


def test_every_file_that_a_file_names_is_served() -> None:
    imports = {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    named = set(re.findall(r'(?:href|src)="dashboard/([\w.]+)"', HTML))
    assert imports | named <= set(FILES.values())
    assert imports | named | {"index.html"} == set(FILES.values())


def test_nothing_is_asked_of_anybody_else() -> None:
    for text in (HTML, CSS, (FOLDER / "icon.svg").read_text(), *SCRIPTS.values()):
        assert set(re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]{2,}[^\s\"')]*", text)) <= ALLOWED
        assert "@import" not in text
        assert "url(" not in text


def test_scripts_have_no_way_to_make_markup_of_a_text() -> None:
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser")
    for name, text in SCRIPTS.items():
        assert not [way for way in ways if way in text], name
        assert 'setAttribute("style"' not in text


class Inline(HTMLParser):
    """Finds what the policy of the page forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = dict(attributes)
        if tag == "style" or (tag == "script" and not names.get("src")):
            self.found.append(tag)
        self.found += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]


def test_the_page_has_no_script_and_no_style_within() -> None:
    parser = Inline()
    parser.feed(HTML)
    assert parser.found == []
    assert "default-src 'self';" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> list[dict[str, str]]:
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r"\{([^{}]*)\}", CSS)]
    return [theme for theme in found if theme]


def test_every_text_can_be_read_on_its_ground_in_both_themes() -> None:
    light, dark, chosen = themes()
    assert dark == chosen  # the system's dark and the one that was chosen
    assert light.keys() == dark.keys()
    texts = ("text", "muted", "accent", "good", "warn", "bad")
    for theme, text, ground in product((light, dark), texts, ("surface", "ground", "sunk")):
        assert contrast(theme[text], theme[ground]) >= NEEDED, (text, ground)
    for theme in (light, dark):
        assert contrast(theme["bad"], theme["bad-ground"]) >= NEEDED
        assert contrast(theme["warn"], theme["warn-ground"]) >= NEEDED


def test_every_reason_is_explained() -> None:
    body = fixed_pages()[REASONS].body.decode()
    assert all(f'"{reason}"' in body for reason in Reason)


# --- as the router serves them


async def asked(router: Router, path: str, method: str = "GET", peer: str = "127.0.0.1") -> Answer:
    request = Request(method, path, [(b"host", b"127.0.0.1:8000")], b"", "", peer)
    answer = await router.handler(method, path)(request)
    assert isinstance(answer, Answer)
    return answer


async def test_the_router_serves_the_page_and_its_state() -> None:
    async with router_app(StaticDirectory(()), RouterSettings(), pages=dashboard) as router:
        for path in (*FILES, REASONS, STATE):
            answer = await asked(router, path)
            assert answer.status == 200
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
        assert (await asked(router, ROOT)).content_type == "text/html; charset=utf-8"
        state = await asked(router, STATE, "HEAD")
        assert state.headers["Cache-Control"] == "no-store"
        assert b'"workers":[]' in state.body


async def test_a_slash_too_many_leads_to_the_page() -> None:
    async with router_app(StaticDirectory(()), RouterSettings(), pages=dashboard) as router:
        for method in ("GET", "HEAD"):
            answer = await asked(router, f"{ROOT}/", method)
            assert answer.status == 308
            assert urljoin(f"http://host{ROOT}/", answer.headers["Location"]) == f"http://host{ROOT}"
            assert urljoin(f"http://host/under{ROOT}/", answer.headers["Location"]) == f"http://host/under{ROOT}"
        for path, method in ((f"{ROOT}//", "GET"), ("/", "GET"), ("/metrics/", "GET"), (f"{ROOT}/", "POST")):
            with pytest.raises(ApiError) as refused:
                router.handler(method, path)
            assert refused.value.status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_nothing_but_reading_is_possible(method: str) -> None:
    async with router_app(StaticDirectory(()), RouterSettings(), pages=dashboard) as router:
        for path in (ROOT, STATE):
            with pytest.raises(ApiError) as refused:
                router.handler(method, path)
            assert refused.value.status == 405


@pytest.mark.parametrize(
    ("pages", "peer", "shown"),
    [
        (OperatorPages.AUTO, "127.0.0.1", True),
        (OperatorPages.AUTO, "192.0.2.7", False),
        (OperatorPages.OPEN, "192.0.2.7", True),
        (OperatorPages.OFF, "127.0.0.1", False),
    ],
)
async def test_the_page_is_shown_to_those_who_may_see_flights(pages: OperatorPages, peer: str, shown: bool) -> None:
    async with router_app(StaticDirectory(()), RouterSettings(operator_pages=pages), pages=dashboard) as router:
        for path in (ROOT, STATE, f"{ROOT}/app.js"):
            if shown:
                assert (await asked(router, path, peer=peer)).status == 200
                continue
            with pytest.raises(ApiError) as refused:
                await asked(router, path, peer=peer)
            assert refused.value.status == 403
