"""`kvbaton restart`: drain a worker that `kvbaton up` started, have it started again, and wait until it is ready.

Law: a worker is drained only if somebody is there to start it again. The exit status is the verdict: 0 when the next
life of that worker is ready, 1 when it is not.
"""

from __future__ import annotations

import argparse
import functools
import time

import msgspec

from kvbaton.cli.drain import (
    DrainOutcome,
    add_worker,
    await_successor,
    drain_if_agreed,
    followed,
    line_of,
    look_at,
    told,
    verdict,
)
from kvbaton.cli.progress import note
from kvbaton.local_cluster import restart_orders
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.ids import WorkerId

START_S = 240.0
"""In which a worker must be ready again: an engine of vLLM on a busy machine takes two minutes."""

_note = functools.partial(note, "restart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_worker(parser, "how long to wait for it to finish what it has")


def run(args: argparse.Namespace) -> int:
    with line_of(args) as line:
        if not restart_orders.is_offered(args.keys, args.worker):
            where = f"{args.worker} --keys {args.keys} --registry {args.registry}"
            raise CommandError(
                f"argument WORKER: no kvbaton up with these keys has started {args.worker}, so its own process manager "
                f"must start it again (systemctl restart kvbaton-prefill@{args.worker}; kubectl delete pod); without "
                f"one: kvbaton drain {where} --wait-for-successor, and when it is gone start it with its own command"
            )
        begun = time.monotonic()
        before = look_at(line, WorkerId(args.worker), args.timeout_s, _note)
        found = drain_if_agreed(line, before, args, "restart", _note, follows=True)
        if found.outcome == "unknown":  # it has gone before, as after a drain that took longer than the last try
            found = DrainOutcome(args.worker, "gone", found.seconds)
        if found.status == 0:
            restart_orders.order(args.keys, args.worker)
            _note(f"{args.worker} has drained, and is started again")
            found = followed(found, await_successor(line, before, START_S, _note, same=True))
            found = msgspec.structs.replace(found, seconds=round(time.monotonic() - begun, 3))
    return told(found, verdict(found, args, before), args, _note)
