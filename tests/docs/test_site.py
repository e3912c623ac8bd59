"""The documentation's site: builds without a warning, fetches nothing, and shows the state machines as they are."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from docs_commands import ROOT, commands_of, pages, spans
from tests.observe.dashboard.browser import a_browser
from tests.tool_modules import tool_module

from kvbaton.observe.metrics.metric_names import METRICS
from kvbaton.protocol.wire import messages

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
BUILD_S = 280.0  # seconds on a quiet machine; a busy one took three minutes
ONE_HOST = ROOT / "docs" / "vllm-guide.md"
PAGE_MS = 240_000
pytestmark = pytest.mark.timeout(900)
FETCHING = {("link", "href"), ("object", "data"), *((tag, "src") for tag in ("script", "img", "iframe", "source"))}
LINKS_ONLY = {"canonical", "prev", "next", "alternate"}


def tool(name: str) -> ModuleType:
    return tool_module(f"docs/{name}")


def build(config: Path, to: Path) -> subprocess.CompletedProcess[str]:
    assert MKDOCS.exists(), "the generator is not here: make docs-env"
    return subprocess.run(
        [MKDOCS, "build", "--strict", "--config-file", config, "--site-dir", to],
        cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ended = build(ROOT / "mkdocs.yml", folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "WARNING" not in ended.stdout + ended.stderr
    return folder


WIDER = """() => [
  ...[...document.querySelectorAll("pre code")].filter(each => each.scrollWidth > each.clientWidth + 1),
  ...(document.documentElement.scrollWidth > window.innerWidth ? [document.body] : []),
].map(each => each.textContent.slice(0, 80))"""
"""Blocks of code with more than their column shows, and a page that must be moved sideways."""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class Fetched(HTMLParser):
    """What a browser would fetch from elsewhere by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name, value in attrs:
            is_away = re.match(r"(https?:)?//", value or "") and given.get("rel") not in LINKS_ONLY
            if (tag, name) in FETCHING and is_away:
                self.found.append(f"<{tag} {name}={value}>")
        if "mermaid" in (given.get("class") or "").split():
            self.found.append("a diagram that is drawn by a script from elsewhere")


def test_every_page_is_there_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    built = sorted(site.rglob("*.html"))
    assert len(built) >= len(list((ROOT / "docs").rglob("*.md")))
    for page in built:
        looked = Fetched()
        looked.feed(page.read_text())
        assert not looked.found, f"{page.name}: {looked.found}"
    for sheet in site.rglob("*.css"):
        fetched = re.findall(r"(?:@import|url\()\s*['\"]?((?:https?:)?//[^'\")]+)", sheet.read_text())
        assert not fetched, f"{sheet.name}: {fetched}"


def test_a_page_that_fetches_would_be_noticed() -> None:
    looked = Fetched()
    looked.feed('<script src="https://cdn.example/x.js"></script><pre class="mermaid">x</pre><a href="https://x">y</a>')
    assert len(looked.found) == 2


def test_a_reader_can_search_and_choose_light_or_dark(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert 'data-md-color-scheme="default"' in text and 'data-md-color-scheme="slate"' in text
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_in_a_browser_code_stays_in_its_column_and_a_copied_command_has_no_prompt(site: Path) -> None:
    handler = functools.partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, a_browser() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_address[1]}"
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(PAGE_MS)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            for name in ("vllm-guide", "settings", "how-it-works", "bench"):
                page.goto(f"{origin}/{name}.html", wait_until="domcontentloaded")
                assert page.evaluate(WIDER) == [], f"{name} at {width}"
        page.evaluate("document.querySelector('link[href*=extra]').disabled = true")
        assert page.evaluate(WIDER) != [], "without our style sheet the last page would be noticed"
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(f"{origin}/vllm-guide.html", wait_until="domcontentloaded")
        (engine, *_) = [each for each in commands_of("", ONE_HOST.read_text()) if "kv_producer" in each.text]
        page.locator(".highlight:has-text('kv_producer') button").first.click()
        page.wait_for_function("async () => (await navigator.clipboard.readText()).length > 0")
        assert page.evaluate("navigator.clipboard.readText()") == engine.text, "all of it, without the prompt"
        server.shutdown()


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("[nowhere](nowhere.md)", "nowhere.md"),
        ("[no such heading](keys.md#no-such-heading)", "no-such-heading"),
        ("[absolute](/keys.md)", "/keys.md"),
    ],
)
def test_a_broken_link_fails_the_build(planted: str, said: str, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Planted\n\n{planted}\n")
    (docs / "keys.md").write_text("# Keys\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0].replace("tools/", f"{ROOT}/tools/")
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav:\n  - index.md\n  - keys.md\n")
    ended = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert ended.returncode != 0 and said in ended.stdout + ended.stderr


def test_the_diagrams_are_those_of_the_tables() -> None:
    diagrams, pictures = tool("docs_diagrams"), tool("docs_pictures")
    files = {path.stem: path.read_text() for path in (ROOT / "docs" / "diagrams").glob("*.svg")}
    drawn = {name: diagrams.draw(machine) for name, machine in diagrams.MACHINES.items()}
    assert files == {**drawn, **pictures.PICTURES}, "run `make docs` and look at the difference"
    said = {word for step in pictures.PULL for word in re.findall(r"\b[A-Z][a-z]{3,}\b", step.text)}
    assert said >= {"Claim", "Granted", "Commit", "Committed"} and all(hasattr(messages, word) for word in said)


def test_every_state_and_every_event_that_leads_on_is_drawn() -> None:
    diagrams = tool("docs_diagrams")
    for name, machine in diagrams.MACHINES.items():
        text = diagrams.draw(machine)
        for state in machine.states:
            assert f">{state.value}</text>" in text, name
        assert text.count('class="step"') == len({(at, to) for (at, _), to in machine.next.items()}), name


def test_a_program_that_reads_finds_every_page() -> None:
    made = tool("llms_docs")
    assert made.FILE.read_text() == made.text(), "run: python tools/docs/llms_docs.py"
    for page in (ROOT / "docs").glob("*.md"):
        assert f"/docs/{page.name})" in made.text() or page.name == "index.md"


def test_pages_that_no_entry_names_come_under_reference(tmp_path: Path) -> None:
    nav = tool("docs_nav")
    (tmp_path / "decisions").mkdir()
    for name in ("index.md", "new.md", "decisions/index.md", "decisions/0001-a.md", "decisions/0002-b.md"):
        (tmp_path / name).write_text("# x\n")
    given = [{"See": ["index.md"]}, {"Reference": []}, {"Decisions": "decisions/*"}]
    found = nav.completed(given, tmp_path)
    decisions = ["decisions/index.md", "decisions/0001-a.md", "decisions/0002-b.md"]
    assert found == [{"See": ["index.md"]}, {"Reference": ["new.md"]}, {"Decisions": decisions}]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_no_page_tells_of_the_machine_that_it_was_written_on(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"/work/|/root/|/home/\w+/|file://", text), "a path of a machine"


NO_METRICS = {"kvbaton_calm", "kvbaton_router_", "kvbaton_transfer_share", "kvbaton_proof", "kvbaton_mori"}
"""A plugin, a prefix, a recording rule's, and two distributions."""


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_every_metric_that_a_page_names_is_exported(page: Path) -> None:
    known = {metric.name for metric in METRICS} | NO_METRICS
    is_history = page.parent.name == "lab" or page.name == "CHANGELOG.md"
    text = "" if is_history else " ".join(spans(page.read_text()))
    named = re.findall(r"\bkvbaton_[a-z_]+", text)
    unknown = {name for name in named if name not in known and re.sub(r"_(bucket|sum|count)$", "", name) not in known}
    assert not unknown
