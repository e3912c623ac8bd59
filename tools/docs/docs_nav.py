"""A hook of MkDocs: completes the navigation, so that a new page needs no line in mkdocs.yml.

`FOLDER/*` stands for every page of that folder, its index first. Pages of docs/ itself that no entry names come at the
end of Reference. Everything else that is nowhere is still a warning, and fails a strict build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

REFERENCE = "Reference"


def on_config(config: Any) -> Any:
    """Called by MkDocs once, before it looks at any page."""
    config["nav"] = completed(config["nav"], Path(config["docs_dir"]))
    return config


def completed(nav: list[Any], docs: Path) -> list[Any]:
    named = set(_pages(nav))
    loose = sorted(page.name for page in docs.glob("*.md") if page.name not in named)
    found = []
    for entry in nav:
        ((title, what),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(what, str) and what.endswith("/*"):
            found.append({title: _folder(docs, what.removesuffix("/*"))})
        elif title == REFERENCE:
            found.append({title: [*what, *loose]})
        else:
            found.append(entry)
    return found


def _folder(docs: Path, name: str) -> list[str]:
    pages = sorted(page.name for page in (docs / name).glob("*.md"))
    first = [page for page in pages if page == "index.md"]
    return [f"{name}/{page}" for page in [*first, *(page for page in pages if page != "index.md")]]


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]
