"""The frame of a lab page: title, what was measured on what, the command, then sections in the order given.

Laws: pure. Every page names its command and what ran, so that a reader can repeat it; each benchmark decides what its
figures say and do not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvbaton_proof.bench.kit.run_facts import public

SAYS = "What this says and does not say"


def lab_page(title: str, about: str, command: Iterable[str], *parts: Iterable[str]) -> str:
    """`about`: one paragraph; each part is lines, with a blank line after it."""
    lines = [f"# {title}", "", about, "", *command, ""]
    for part in parts:
        found = list(part)
        lines += [*found, ""] if found else []
    return "\n".join(lines)


def indented(command: str) -> list[str]:
    return [f"    {command}"]


def console(command: str) -> list[str]:
    """Documentation tests look for the mark: it says that this one takes minutes."""
    return ["<!-- run: needs=minutes -->", "```console", f"$ {command}", "```"]


def section(title: str, *lines: str) -> list[str]:
    return [f"## {title}", *lines] if lines else []


def bullets(title: str, lines: Iterable[str]) -> list[str]:
    return section(title, *(f"- {line}" for line in lines))


def what_ran(commands: Mapping[str, str]) -> list[str]:
    return bullets("What ran", (f"{name}: `{public(line)}`" for name, line in commands.items()))
