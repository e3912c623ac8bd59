"""Numbers as Prometheus text. A name that ends in `_total` is a counter, every other a gauge; one table, no registry.

Law: a label's value comes from a closed list (modes, reasons, worker names), never from a client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4"
Numbers = Mapping[str, Any]
"""Name to number, or name to {label value: number}; anything else is left out."""


def render(numbers: Numbers, prefix: str = "kvbaton", label: str = "kind") -> str:
    lines: list[str] = []
    for name, value in numbers.items():
        samples = list(_samples(value, label))
        if samples:
            full = f"{prefix}_{name}"
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE {full} {kind}", *(f"{full}{labels} {number}" for labels, number in samples)]
    return "\n".join(lines) + "\n"


def _samples(value: Any, label: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(each, int | float):
                yield f'{{{label}="{_escape(str(key))}"}}', _number(each)
    elif isinstance(value, int | float):
        yield "", _number(value)


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, bool) else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
