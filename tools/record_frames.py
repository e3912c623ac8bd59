"""Records what a release of kvbaton says on the wire: whole conversations, as bytes, for `tests/upgrade`.

    git archive <commit> | tar -x -C /tmp/release
    python tools/record_frames.py --tree /tmp/release --name <commit> --out tests/upgrade/frames

The release's own code and its own test harness run; only the scripts of the conversations are of this tree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=HERE, help="the release's tree (default: this one)")
    parser.add_argument("--name", required=True, help="what to call it in the recordings, such as its commit")
    parser.add_argument("--out", type=Path, required=True, help="folder for one file per conversation")
    options = parser.parse_args()
    tree = options.tree.resolve()
    sys.path[:0] = [str(tree / "src"), str(tree / "tests" / "protocol"), str(HERE / "tests" / "upgrade")]
    import kvbaton

    if not Path(kvbaton.__file__).is_relative_to(tree):
        raise SystemExit(f"--tree: kvbaton came from {kvbaton.__file__}, not from {tree}")
    from conversations import CONVERSATIONS, REFUSALS, record
    from pair import Pair

    options.out.mkdir(parents=True, exist_ok=True)
    for name, conversation in {**CONVERSATIONS, **REFUSALS}.items():
        lines = [{"conversation": name, "recorded_from": options.name}, *record(Pair("p", "d"), conversation)]
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name}: {len(lines) - 1} frames")


if __name__ == "__main__":
    main()
