"""Prints the files of kvbaton that one pull under vLLM passes through, on all threads.

    .venv-vllm/bin/python tools/pull_path.py

A pair of vLLM's schedulers in one process, without a model (`kvbaton conformance vllm`). The first pull between two
engines also pairs them; a second one is that of a warm pair. A file counts when one of its functions is called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import kvbaton
from kvbaton_proof.conformance.lab import Lab, prompt_of

PRODUCT = f"{Path(kvbaton.__file__).parent}/"
ENOUGH = 65


class CalledFiles:
    """A profile hook for all threads that begin after it; counts while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.functions: dict[str, set[str]] = {}

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if self.on and event == "call" and (path := frame.f_code.co_filename).startswith(PRODUCT):
            self.functions.setdefault(path, set()).add(frame.f_code.co_qualname)


def main() -> int:
    called = CalledFiles()
    threading.setprofile(called)
    sys.setprofile(called)
    counts = Counter[str]()
    with contextlib.closing(Lab()) as lab:
        lab.duo(transport="shm")
        for pull in ("first", "warm"):
            called.functions.clear()
            called.on = True
            lab.finish(lab.hand_over("pull", prompt_of(40, len(counts))), loads=1)
            called.on = False
            counts[pull] = len(called.functions)
            lines = sum(len(Path(path).read_text().splitlines()) for path in called.functions)
            functions = sum(map(len, called.functions.values()))
            print(f"{pull} pull: {counts[pull]} files of {lines:,} lines, {functions} functions")
            for path in sorted(called.functions):
                print(f"  {path.removeprefix(PRODUCT)}  {len(called.functions[path])}")
    sys.setprofile(None)
    return 0 if counts["first"] <= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
