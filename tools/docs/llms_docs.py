"""Writes docs/llms.txt: the documentation's pages with one sentence each, for programs that read before they answer.

    python tools/docs/llms_docs.py

The order is that of mkdocs.yml. A test compares the file with what this makes, so that no page is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "llms.txt"
BASE = "https://github.com/kvbaton/kvbaton/blob/main"
SENTENCE_CHARS_MAX = 200
_NAV = re.compile(r"^  - (?P<section>\w[\w ]*):\s*(?P<only>\S+)?$|^      - (?:[^:]+: )?(?P<page>[\w/.-]+\.md)$")


def text() -> str:
    home = (ROOT / "docs" / "index.md").read_text()
    summary = " ".join(home.split("\n\n")[1].split())
    return "\n".join([f"# kvbaton\n\n> {summary}\n", *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    yield f"- [README]({BASE}/README.md): start, claims and status"
    yield f"- [Architecture]({BASE}/ARCHITECTURE.md): the tree, the nouns, the life of a request, the layers\n"
    named: set[str] = set()
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines()
    for found in filter(None, map(_NAV.match, lines)):
        if found["section"]:
            only = found["only"] or ""
            if only.endswith("/*"):
                folder = only.removesuffix("/*")
                yield f"\n## {found['section']}\n\n{_entry(ROOT / 'docs' / folder / 'index.md')}"
            elif not only:
                yield f"\n## {found['section']}\n"
        elif (page := ROOT / "docs" / found["page"]).exists():
            named.add(page.name)
            yield _entry(page)
    loose = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in named | {"index.md"})
    if loose:
        yield "\n## More\n"
        yield from map(_entry, loose)


def _entry(page: Path) -> str:
    content = page.read_text()
    title = content.partition("\n")[0].removeprefix("# ")
    return f"- [{title}]({BASE}/{page.relative_to(ROOT).as_posix()}): {_first(content)}"


def _first(content: str) -> str:
    """The first sentence of a page's first paragraph."""
    paragraphs = [part for part in content.split("\n\n") if re.match(r"[A-Za-z`\[]", part)]
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)|[*`]", r"\1", " ".join(paragraphs[0].split())) if paragraphs else ""
    sentence = re.split(r"(?<=[.?])\s", plain)[0].rstrip(":")
    return sentence if len(sentence) <= SENTENCE_CHARS_MAX else f"{sentence[:SENTENCE_CHARS_MAX].rsplit(' ', 1)[0]} …"


if __name__ == "__main__":
    FILE.write_text(text())
