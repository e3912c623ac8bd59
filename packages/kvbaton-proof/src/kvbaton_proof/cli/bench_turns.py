"""`kvbaton bench turns`: time to first token of the turns of a conversation, with and without turns kept by D.

Law: the exit status is the verdict on answers, never on speed: 0 if all clusters gave the same.
"""

from __future__ import annotations

import argparse
import functools

import msgspec

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.cli import installed
from kvbaton.cli.progress import note
from kvbaton.local_cluster import vllm_engine
from kvbaton.local_cluster.vllm_cluster import TINY_KINDS, TINY_SEED
from kvbaton.local_cluster.vllm_engine import ServerOptions, tiny_model
from kvbaton.processes.operator_control import told_to_stop
from kvbaton_proof.bench.turn_talks import TARGETS, TalkReport, TalkShape, measured

_say = functools.partial(note, "bench")


def run(args: argparse.Namespace) -> int:
    if args.engine != "vllm":
        installed.need("numpy")
    shape = TalkShape(args.turns, args.first, args.answer, args.more, args.conversations)
    return run_loop(_run(args, shape))


async def _run(args: argparse.Namespace, shape: TalkShape) -> int:
    server = _server(args, shape) if args.engine == "vllm" else None
    with told_to_stop() as stop:
        report = await measured(args.engine, server, shape, _say, stop)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report)
    return 0 if report.is_right else 1


def _server(args: argparse.Namespace, shape: TalkShape) -> ServerOptions:
    python = vllm_engine.find_python(args.vllm_python)
    model = tiny_model(python, TINY_KINDS[0], TINY_SEED)
    context = shape.first + shape.turns * (shape.answer + shape.more)
    return ServerOptions(python=python, model=str(model), served_name="tiny", max_model_len=max(2048, context + 64))


def _show(report: TalkReport) -> None:
    print(f"time to first token, ms, median of {report.shape.conversations} conversations ({report.engine} engines)")
    print("turn        " + "".join(f"{turn + 1:>9}" for turn in range(report.shape.turns)))
    for name in TARGETS:
        print(f"{name:<12}" + "".join(f"{ms:>9.1f}" for ms in report.ttft_ms[name]))
    print(f"turns {report.turns}, tokens taken from D {report.taken_tokens}, wrong answers {report.wrong}")
