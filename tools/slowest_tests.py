"""What took the time: pieces of a test run by the JUnit files that pytest left in a folder, then the slowest tests.

    python tools/slowest_tests.py build/times [--count 50]

Law: it only tells. A file that cannot be read is named, and costs its own lines.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from xml.etree import ElementTree


def cases(path: Path) -> list[tuple[float, str]]:
    """Seconds of each test, set-up and tear-down included, and its name."""
    found = ElementTree.parse(path).iter("testcase")
    return [(float(case.get("time", 0)), f"{case.get('classname', '')}::{case.get('name', '')}") for case in found]


def report(folder: Path, count: int) -> list[str]:
    every: list[tuple[float, str]] = []
    lines = [f"{'tests':>6} {'seconds of tests':>17}  piece"]
    for path in sorted(folder.glob("*.xml")):
        try:
            piece = cases(path)
        except (ElementTree.ParseError, ValueError) as error:
            lines.append(f"{path}: {error}")
            continue
        every += piece
        lines.append(f"{len(piece):6} {sum(seconds for seconds, _ in piece):17.0f}  {path.stem}")
    slowest = sorted(every, reverse=True)[:count]
    lines.append(f"{len(every):6} {sum(seconds for seconds, _ in every):17.0f}  all; the {len(slowest)} slowest:")
    return lines + [f"{seconds:9.1f} s  {name}" for seconds, name in slowest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=50)
    args = parser.parse_args()
    print("\n".join(report(args.folder, args.count)))


if __name__ == "__main__":
    main()
