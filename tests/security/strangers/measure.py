"""What strangers cost honest clients: both in one run, side by side, as one JSON object. Behind docs/lab.

python -m tests.security.strangers.measure [seconds per turn] [turns]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.security.strangers.besieged import Figures, Intruders, Siege, siege

IDLE = 1000


def figures(turns: list[Figures], quiet: list[Figures]) -> dict[str, Any]:
    per_s = [each.per_s for each in turns]
    ratios = [each.per_s / beside.per_s for each, beside in zip(turns, quiet, strict=True)]
    return {
        "per_s": round(statistics.median(per_s), 1),
        "ratio": round(statistics.median(ratios), 2),
        "slowest_s": round(max(each.slowest_s for each in turns), 2),
        "right": sum(each.right for each in turns),
        "bad": sum(len(each.bad) for each in turns),
    }


def visited(town: Siege, seconds: float, told: dict[str, int]) -> Figures:
    with Intruders(town.places(), seconds + 1, keys=town.public_keys()) as strangers:
        strangers.line()
        found = town.honest(seconds)
        for name, count in strangers.line().items():
            told[name] = told.get(name, 0) + count
    return found


def crowded(town: Siege, seconds: float) -> Figures:
    with Intruders(town.places(), 0.0, each=IDLE) as strangers:
        strangers.line()
        found = town.honest(seconds)
        strangers.go()
    return found


def main(seconds: float, turns: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as directory,
        siege(Path(directory), "--store", "memory", "--transport", "tcp") as town,
    ):
        town.honest(seconds)
        seen = [town.uses()]
        rows: dict[str, list[Figures]] = {"quiet": [], "visits": [], "crowd": []}
        told: dict[str, int] = {}
        for _ in range(turns):
            rows["quiet"].append(town.honest(seconds))
            rows["visits"].append(visited(town, seconds, told))
            rows["crowd"].append(crowded(town, seconds))
            seen.append(town.uses())
        uses = {
            name: {"fds": [each[name].fds for each in seen], "rss_mib": [round(each[name].rss_mib) for each in seen]}
            for name in seen[0]
        }
        return {
            "ports": len(town.places()), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
            "rows": {name: figures(each, rows["quiet"]) for name, each in rows.items()}, "visits": told, "uses": uses,
        }  # fmt: skip


if __name__ == "__main__":
    words = [float(word) for word in sys.argv[1:]]
    print(json.dumps(main(words[0] if words else 5.0, int(words[1]) if len(words) > 1 else 3), indent=1))
