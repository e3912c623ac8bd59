"""The dashboard's files and the headers with which they are served.

Law: only the entries of `FILES` are served, as packaged, read once. A browser that honours the headers runs and loads
nothing external on this page, and does not embed it in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import msgspec

from kvbaton.observe.codes.code_catalogue import CATALOGUE
from kvbaton.observe.codes.entry import CodeKind

ROOT = "/dashboard"
STATE = f"{ROOT}/state"
REASONS = f"{ROOT}/reasons"

FILES = {
    ROOT: "index.html",
    **{
        f"{ROOT}/{name}": name
        for name in (
            "style.css", "icon.svg", "theme.js", "app.js", "dom.js", "dots.js", "drawer.js", "failures.js", "format.js",
            "key.js", "stages.js", "tiles.js", "timeline.js", "topology.js", "workers.js",
        )
    },
}  # fmt: skip

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


class Page(msgspec.Struct, frozen=True):
    """A complete response."""

    body: bytes
    content_type: str
    headers: Mapping[str, str]


def json_page(body: bytes) -> Page:
    """A response that changes: never cached."""
    return Page(body, _TYPES["json"], {**HEADERS, "Cache-Control": "no-store"})


def fixed_pages() -> dict[str, Page]:
    """All static responses, by path."""
    folder = resources.files("kvbaton.observe.dashboard") / "page"
    found = {}
    for path, name in FILES.items():
        found[path] = Page((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]], HEADERS)
    kinds = (CodeKind.REASON, CodeKind.API, CodeKind.STATUS)
    known = {kind: {entry.code: entry for entry in CATALOGUE[kind]} for kind in kinds}
    found[REASONS] = Page(msgspec.json.encode(known), _TYPES["json"], HEADERS)
    return found
