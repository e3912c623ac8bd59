"""`kvbaton bench transfer --device cuda`: device memory between two processes on one GPU, all methods in one run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from kvbaton.processes.operator_errors import CommandError
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton_proof.bench.device import device_page, device_ways
from kvbaton_proof.bench.kit.piped_children import ChildFailed


def run(args: argparse.Namespace) -> int:
    """The exit status is the verdict: 0 when every byte was right and every bound holds."""
    try:
        report = device_ways.measure(args.repetitions)
    except (ImportError, CudaError, ChildFailed) as error:
        raise CommandError(f"--device cuda: {error}") from None
    found = device_page.verdicts(report)
    if args.plot is not None:
        Path(args.plot).write_text(device_page.plot(report))
    if args.json:
        print(json.dumps({**msgspec.to_builtins(report), "verdicts": msgspec.to_builtins(found)}))
    else:
        print(device_page.table(report))
    return 0 if all(each.ok for each in found) else 1
