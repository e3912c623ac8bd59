"""`kvbaton chaos`: real processes under a seeded plan of faults; the exit status says whether the promises held.

Law: 0 only if every promise held; 1 if one broke; 2 for a usage or environment error. Progress goes to stderr, the
verdict to stdout; what is needed to investigate or to run it again is in the folder named at the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import random
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.cli import progress
from kvbaton.cli.arguments import minutes, whole
from kvbaton.cli.progress import note
from kvbaton.cli.screen import stdout
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.chaos import chaos_plan as plans
from kvbaton_proof.chaos.fault_catalogue import BY_NAME, FAULTS, ON_STREAMS, PROMISES
from kvbaton_proof.chaos.outcome import Outcome
from kvbaton_proof.rig.connectors import CONNECTORS, given

SIZE_MAX = 16
STREAMS, VLLM_STREAMS, STREAMS_MAX = 64, 24, 512
PLANS = ("random", "standard", "streams")

_note = functools.partial(note, "chaos")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--minutes", type=minutes, default=3.0, metavar="N", help="duration of the load on embedded engines")
    add("--seed", type=whole(0, (1 << 31) - 1), default=None, metavar="S", help="seed of the plan (default: random)")
    add("--engine", choices=("embedded", "vllm"), default="embedded", help="which engines")
    add("--connector", default="kvbaton", metavar="NAME", help="with vllm: the connector to test: "
        "kvbaton, nixl, or anybody's as NAME=JSON (docs/test-your-own-connector.md)")  # fmt: skip
    add("--plan", choices=PLANS, default=None, help="random for embedded engines, standard for vllm; or streams")
    add("--faults", default=None, metavar="A,B", help="only these; kvbaton chaos --list names them")
    add("--prefill", type=whole(1, SIZE_MAX), default=2, metavar="N", help="embedded prefill workers")
    add("--decode", type=whole(1, SIZE_MAX), default=2, metavar="N", help="embedded decode workers")
    add("--replay", default=None, metavar="FILE", help="run the plan in this file, plan.json of an earlier run")
    add("--out", default=None, metavar="DIR", help="folder for report, plan and logs (default: a new one)")
    add("--vllm-python", default=None, metavar="PATH", help="the Python interpreter with vLLM, if not this one")
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("--list", action="store_true", help="print every fault with its targets, moments and the promises it tests")
    add = parser.add_argument_group("--plan streams").add_argument
    add("--streams", type=whole(1, STREAMS_MAX), default=None, metavar="N", help="long streams kept open (64, vllm 24)")
    add("--prompt-tokens", type=whole(16, 3072), default=64, metavar="N", help="of the prompts of long streams")
    add("--copies-percent", type=float, default=0.0, metavar="P", help="of a D's blocks, as copies of its answers")
    add("--no-continue", action="store_true", help="the router lets streams die with their D: the check must fail")


def run(args: argparse.Namespace) -> int:
    if args.list:
        print(_list_as_json() if args.json else _list_as_text())
        return 0
    raise_file_limit()
    args.connector = _connector(args.connector)
    args.seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    plan = _plan(args)
    if plan is None:
        with progress.shown("chaos", quiet=args.json):
            outcome, out = _on_vllm(args)
    else:
        outcome, out = _on_embedded(args, plan, os.environ)
    return _tell(args, outcome, out)


# --- the plan


def _plan(args: argparse.Namespace) -> plans.Plan | None:
    """The plan for embedded engines; None: vLLM's own."""
    faults = _faults(args)
    if args.replay is not None:
        try:
            plan = plans.from_json(Path(args.replay).read_bytes())
        except OSError as error:
            raise CommandError(f"argument --replay: {args.replay}: {error.strerror}; give a plan.json") from None
        except ValueError as error:
            raise CommandError(f"argument --replay: {args.replay}: {error}; give a plan.json") from None
        if plan.engine == "embedded":
            return plan
        args.engine, args.connector, args.seed = plan.engine, plan.connector, plan.seed
        return None
    if args.engine == "vllm":
        if args.plan == "random":
            raise CommandError("argument --plan: vLLM has only the standard plan; remove --plan")
        return None
    if args.plan == "standard":
        raise CommandError("argument --plan: the standard plan is for --engine vllm; remove --plan")
    if args.connector != "kvbaton":
        raise CommandError(f"argument --connector: embedded engines support only kvbaton's, not {args.connector}")
    if 60 * args.minutes > plans.SECONDS_MAX:
        raise CommandError(f"argument --minutes: got {args.minutes:g}, at most {plans.SECONDS_MAX // 60}")
    draw = importlib.import_module("kvbaton_proof.chaos.draw")
    size, seconds = draw.Size(args.prefill, args.decode), 60 * args.minutes
    try:
        if args.plan == "streams":
            drawn: plans.Plan = draw.draw_streams(args.seed, seconds, size, args.streams or STREAMS, faults)
        else:
            drawn = draw.draw(args.seed, seconds, size, faults)
        return msgspec.structs.replace(
            drawn,
            streams=args.streams or drawn.streams,
            prompt_tokens=args.prompt_tokens,
            copies_percent=args.copies_percent,
            streams_continue=not args.no_continue,
        )
    except ValueError as error:
        raise CommandError(f"argument --{error}") from None


def _connector(text: str) -> str:
    known = [name for name, each in CONNECTORS.items() if not each.is_alone]
    try:
        found = given(text) if "=" in text else CONNECTORS[text]
    except ValueError as error:
        raise CommandError(f"argument --connector: {error}") from None
    except KeyError:
        raise CommandError(f"argument --connector: got {text!r}, expected {', '.join(known)} or NAME=JSON") from None
    if found.is_alone:
        raise CommandError(f"argument --connector: {found.name} hands nothing over; name one that does")
    return found.name


def _faults(args: argparse.Namespace) -> list[str] | None:
    if args.faults is None:
        return None
    names: list[str] = [name.strip() for name in args.faults.split(",") if name.strip()]
    for name in names:
        if name not in BY_NAME and args.engine == "embedded" and args.plan != "streams":
            raise CommandError(f"argument --faults: got {name!r}, expected some of {', '.join(BY_NAME)}")
    if not names:
        raise CommandError("argument --faults: names no fault; see: kvbaton chaos --list")
    return names


def _on_vllm(args: argparse.Namespace) -> tuple[Outcome, Path]:
    vllm = importlib.import_module("kvbaton_proof.chaos.vllm.vllm_run")
    report = importlib.import_module("kvbaton_proof.chaos.outcome")
    out = _folder(args)
    try:
        if args.plan == "streams":
            streams = importlib.import_module("kvbaton_proof.chaos.vllm.vllm_streams")
            plan = streams.plan_of(args.seed, args.minutes, args.streams or VLLM_STREAMS, _faults(args))
            plan = msgspec.structs.replace(plan, streams_continue=not args.no_continue)
            outcome: Outcome = vllm.run_streams(plan, _note, out, args.vllm_python)
        else:
            outcome = vllm.run(args.connector, args.seed, _note, out, _faults(args), args.vllm_python)
    except ValueError as error:
        raise CommandError(f"argument --{error}") from None
    except vllm.VllmRunError as error:
        raise CommandError(f"{error}; the logs are in {out}") from None
    report.write(out, report.bare(outcome))
    return outcome, out


def _on_embedded(args: argparse.Namespace, plan: plans.Plan, environ: MutableMapping[str, str]) -> tuple[Outcome, Path]:
    networks = importlib.import_module("kvbaton_proof.chaos.network.networks")
    members = importlib.import_module("kvbaton_proof.chaos.members")
    report = importlib.import_module("kvbaton_proof.chaos.outcome")
    conductor = importlib.import_module("kvbaton_proof.chaos.conductor")
    out = _folder(args)
    kept = out / "plan.json"
    kept.write_bytes(plans.to_json(plan))
    words = ["chaos", "--replay", str(kept), "--out", str(out), *(["--json"] if args.json else [])]
    again = [sys.executable, "-m", "kvbaton.cli.main", *words]
    names = members.names(plan.prefills, plan.decodes)
    try:
        network = networks.inside(names, again, environ, _note, seed=plan.seed)  # may restart this program
    except networks.NetworkError as error:
        raise CommandError(f"cannot create a network for the members: {error}") from None
    try:
        with progress.shown("chaos", quiet=args.json):
            seen = conductor.run(plan, network, out, _note)
    except conductor.FleetError as error:
        raise CommandError(f"{error}; the logs are in {out}") from None
    replay = f"kvbaton chaos --replay {kept}"
    outcome: Outcome = msgspec.structs.replace(seen.outcome, replay=replay)
    report.write(out, msgspec.structs.replace(seen, outcome=outcome))
    return outcome, out


def _folder(args: argparse.Namespace) -> Path:
    if args.out is None:
        return Path(tempfile.mkdtemp(prefix="kvbaton-chaos-report-"))
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"argument --out: {out}: {error.strerror}; choose a writable folder") from None
    return out


# --- output


def _tell(args: argparse.Namespace, outcome: Outcome, out: Path) -> int:
    if args.json:
        print(msgspec.json.encode({"ok": outcome.ok, **msgspec.to_builtins(outcome)}).decode(), flush=True)
    else:
        print(_summary(outcome), flush=True)
    for problem in outcome.problems:
        _note(problem)
    _note(f"report, plan and logs: {out}")
    if outcome.replay:
        _note(f"again: {outcome.replay}")
    return 0 if outcome.ok else 1


def _summary(outcome: Outcome) -> str:
    report = importlib.import_module("kvbaton_proof.chaos.outcome")
    bad = [f"  {row.at_s:6.1f} s  {row.title}: {row.note or 'failed'}" for row in outcome.rows if not row.ok]
    return "\n".join([report.headline(outcome), *bad, f"verdict: {stdout().verdict(outcome.ok)}"])


def _listed() -> list[dict[str, Any]]:
    return [
        {
            "fault": fault.name, "what": fault.what, "targets": list(fault.targets), "moments": list(fault.moments),
            "promises": {str(number): PROMISES[number] for number in fault.promises}, "vllm": fault.vllm,
        }
        for fault in (*FAULTS, *ON_STREAMS)
    ]  # fmt: skip


def _list_as_json() -> str:
    promises = {str(number): text for number, text in PROMISES.items()}
    return msgspec.json.encode({"ok": True, "promises": promises, "faults": _listed()}).decode()


def _list_as_text() -> str:
    lines = []
    for fault in (*FAULTS, *ON_STREAMS):
        moments = "" if len(fault.moments) == 1 else f"; at {', '.join(fault.moments)}"
        lines.append(f"{fault.name:<13} {fault.what}")
        lines.append(f"{'':<13} to {', '.join(fault.targets)}{moments}")
        lines.append(f"{'':<13} tests: {', '.join(f'{number} {PROMISES[number]}' for number in fault.promises)}")
    return "\n".join(lines)
