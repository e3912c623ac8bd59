"""vLLM's own connector tests, with the connectors that they name and with BatonConnector in their place.

    .venv-vllm/bin/python tools/upstream_tests.py ~/vllm [--json] [--only WORDS] [--no-handshake]

`~/vllm` is a checkout of vLLM's repository, as near to the installed release as can be had: the package brings no
tests. They run against the vLLM of the Python that runs this. Nothing is downloaded, and nothing is written to the
checkout or to this tree.

Laws: which tests concern a connector is found out and not listed: a first run, with everything as it is, notes for each
test whether vLLM looked up one of the connectors that ours can stand for (`upstream_plugin.SWAPPED`). These run again
with ours. A test that passes with the connector it names and not with ours is a difference; each is in
tools/upstream_expectations.toml with the reason why it is the other connector's own, or the command fails. A test that
does not pass as it is says nothing about ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import upstream_plugin as plugin

ROOT = Path(__file__).parents[1]
EXPECTATIONS = ROOT / "tools" / "upstream_expectations.toml"
RUN_S_MAX = 3000
TEST_S_MAX = 120

SAME, EXPECTED, UNKNOWN, NOT_HERE, HEALED, BETTER = "same", "expected", "UNKNOWN", "not here", "healed", "better"


class Result(msgspec.Struct, frozen=True):
    """How one test ended in one run."""

    test: str
    outcome: str
    said: str = ""
    built: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What some tests take for granted and only the connector that they name does."""

    name: str
    why: str
    tests: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: where tests are looked for, and the differences that are known."""

    paths: tuple[str, ...]
    models: dict[str, dict[str, Any]]
    expectation: tuple[Expectation, ...] = ()

    def reasons(self) -> dict[str, Expectation]:
        """By test; ValueError for a test with two reasons."""
        found: dict[str, Expectation] = {}
        for each in self.expectation:
            for test in each.tests:
                if test in found:
                    raise ValueError(f"{EXPECTATIONS.name}: {test} is under {found[test].name} and {each.name}")
                found[test] = each
        return found


class Line(msgspec.Struct, frozen=True):
    """One test in the table."""

    test: str
    names: tuple[str, ...]  # connectors, of those that are swapped
    named: str  # how it ended with them
    ours: str
    verdict: str
    reason: str = ""  # the expectation's name, or what the failure said
    notes: tuple[str, ...] = ()
    said: str = ""  # by ours, where it failed


def read_plan(path: Path = EXPECTATIONS) -> Plan:
    return msgspec.convert(tomllib.loads(path.read_text()), Plan)


def concerned(results: Iterable[Result]) -> list[Result]:
    """Those that had vLLM look up a connector that ours can stand for."""
    return [each for each in results if any(name in plugin.SWAPPED for name in each.built)]


def compare(named: Iterable[Result], ours: Iterable[Result], reasons: Mapping[str, Expectation]) -> list[Line]:
    """The table; a test of the first run that the second did not tell of has failed there."""
    second = {each.test: each for each in ours}
    return [_line(each, second.get(each.test), reasons.get(each.test)) for each in named]


def _line(named: Result, ours: Result | None, known: Expectation | None) -> Line:
    ours = ours or Result(named.test, "failed", "it did not end")
    reason = ""
    if named.outcome != "passed":
        verdict = BETTER if ours.outcome == "passed" else NOT_HERE
        reason = named.said
    elif ours.outcome == "passed":
        verdict, reason = (HEALED, known.name) if known else (SAME, "")
    else:
        verdict, reason = (EXPECTED, known.name) if known else (UNKNOWN, ours.said or ours.outcome)
    names = tuple(name for name in named.built if name in plugin.SWAPPED)
    return Line(named.test, names, named.outcome, ours.outcome, verdict, reason, ours.notes, ours.said)


def unseen(lines: Iterable[Line], reasons: Mapping[str, Expectation]) -> list[str]:
    """Expectations of tests that this checkout does not have, or that concern no connector there."""
    seen = {each.test for each in lines}
    return [test for test in reasons if test not in seen]


def table(lines: Sequence[Line], plan: Plan) -> str:
    """For people: a line for each test, then the reasons."""
    width = max([len(_short(each.test)) for each in lines] or [4])
    rows = [f"{'test':{width}}  {'named':8} {'ours':8} {'':9}"]
    for each in sorted(lines, key=lambda line: line.test):
        said = "; ".join((each.reason, *each.notes) if each.reason else each.notes)
        row = f"{_short(each.test):{width}}  {each.named:8} {each.ours:8} {each.verdict:9} {said}"
        rows.append(row.rstrip())
    used = {each.reason for each in lines if each.verdict in (EXPECTED, HEALED)}
    for each in plan.expectation:
        if each.name in used:
            rows += ["", *textwrap.wrap(f"{each.name}: {each.why}", 118, subsequent_indent="    ")]
    return "\n".join(rows)


def summary(lines: Sequence[Line]) -> str:
    counts = Counter(each.verdict for each in lines)
    passed = [each for each in lines if each.verdict in (SAME, HEALED)]
    mocked = sum(plugin.MOCKED in each.notes for each in passed)
    unloaded = sum(plugin.NO_LOAD in each.notes and plugin.MOCKED not in each.notes for each in passed)
    aside = [f"{count} of them {what}" for count, what in (
        (mocked, "with a mock in its place"), (unloaded, "although ours loads nothing in them"),
    ) if count]  # fmt: skip
    told = [
        f"{len(lines)} tests name a connector that ours can stand for",
        f"{len(passed)} pass with both" + (f" ({', '.join(aside)})" if aside else ""),
        f"{counts[EXPECTED]} differ as expected",
        f"{counts[UNKNOWN]} differ and nobody knows why",
        f"{counts[NOT_HERE] + counts[BETTER]} do not pass here as they are"
        + (f" ({counts[BETTER]} of them with ours)" if counts[BETTER] else ""),
    ]
    return "; ".join(told)


def _short(test: str) -> str:
    return test.removeprefix("tests/v1/kv_connector/unit/").removeprefix("tests/v1/")


# --- running


def run(source: Path, tests: Sequence[str], plan: Plan, told: Mapping[str, str]) -> list[Result]:
    """One run of these tests or files, in a folder of its own. `told`: what the plugin is asked to do, if anything."""
    with tempfile.TemporaryDirectory(prefix="kvbaton-upstream-") as folder:
        base = Path(folder)
        (base / "tests").symlink_to(source / "tests", target_is_directory=True)
        (base / "pytest.ini").write_text("[pytest]\naddopts = -q --tb=line -W ignore --continue-on-collection-errors\n")
        hub(base / "hub", plan.models)
        (base / "tmp").mkdir()
        report = base / "report.jsonl"
        report.touch()
        words = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-p", plugin.__name__]
        words += ["--rootdir", folder, "-c", str(base / "pytest.ini"), "-o", f"timeout={TEST_S_MAX}", *tests]
        env = {**os.environ, **environment(base), **told}
        done = subprocess.run(
            words, cwd=base, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=RUN_S_MAX,
        )  # fmt: skip
        results = [msgspec.convert(json.loads(line), Result) for line in report.read_text().splitlines()]
    if not results:
        raise RuntimeError(f"pytest told of no test:\n{done.stdout[-4000:]}")
    return results


def environment(base: Path) -> dict[str, str]:
    """No network, no writing beside the tests, the same hashes each time."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(base / "hub"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TMPDIR": str(base / "tmp"),
        plugin.REPORT_ENV: str(base / "report.jsonl"),
        plugin.KEYS_ENV: str(base / "keys"),
        plugin.SWAP_ENV: "",
    }


def hub(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """The models that these tests name, as a hub's cache has them; their shape alone, since no test computes."""
    for name, config in models.items():
        home = folder / f"models--{name.replace('/', '--')}"
        kept = home / "snapshots" / ("0" * 40)
        kept.mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("0" * 40)
        (kept / "config.json").write_text(json.dumps(config))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a checkout of vLLM's repository")
    parser.add_argument("--only", nargs="+", metavar="PATH", help="these files or tests of it alone")
    parser.add_argument("--no-handshake", action="store_true", help="schedulers whose workers never came to be")
    parser.add_argument("--role", default="", help="a kv_role for ours in place of each test's own, such as kv_both")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    args = parser.parse_args(words)
    plan = read_plan()
    reasons = plan.reasons()
    if not (args.source / "tests" / "v1" / "kv_connector").is_dir():
        print(f"{args.source}: no tests/v1/kv_connector; give a checkout of vLLM's repository", file=sys.stderr)
        return 2
    source = args.source.resolve()
    paths = [path for path in args.only or plan.paths if (source / path.partition("::")[0]).exists()]
    named = run(source, paths, plan, {})
    wanted = concerned(named)
    lost = [each for each in named if each.outcome == "not collected"]
    told = {plugin.SWAP_ENV: "1", plugin.HANDSHAKE_ENV: "" if args.no_handshake else "1", plugin.ROLE_ENV: args.role}
    ours = run(source, [each.test for each in wanted], plan, told) if wanted else []
    lines = compare(wanted, ours, reasons)
    missing = [] if args.only else unseen(lines, reasons)
    if args.json:
        found = {"tests": lines, "not_collected": lost, "expectations_without_a_test": missing, "looked_at": len(named)}
        print(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        print(table(lines, plan))
        for each in lost:
            print(f"\nnot collected: {each.test}: {each.said}")
        for test in missing:
            print(f"\nno such test here: {test} (in {EXPECTATIONS.name})")
        for line in lines:
            if line.verdict == HEALED:
                print(f"\npasses now, and is still in {EXPECTATIONS.name}: {line.test} ({line.reason})")
        print(f"\n{summary(lines)}")
    return 1 if any(each.verdict == UNKNOWN for each in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
