"""What `kvbaton inspect --json` must show of a handoff, whichever engine made it."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbaton.cli.main import main

AT_ROUTER = {"prefill", "first_token"}
AT_P = {"prefill_queue", "compute", "hold"}
AT_D = {"claim", "queue", "copy", "commit", "deliver"}
WHOLE_S = 30.0
LOOK_S = 0.1


def inspect(*words: str) -> tuple[int, dict[str, Any]]:
    """Run the command; its status and the one object that it prints."""
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        status = main(["inspect", "--json", *words])
    assert printed.getvalue(), told.getvalue()
    found: dict[str, Any] = json.loads(printed.getvalue())
    return status, found


def check_whole(journey: Mapping[str, Any], *, pushed: bool = False) -> None:
    """Router, P and D are on it, each with its own id, in the order of cause and effect, with every stage."""
    lanes = {lane["seat"]: lane for lane in journey["lanes"]}
    assert list(lanes) == ["router", "prefill", "decode"], journey
    assert len({lane["request"] for lane in lanes.values()}) == 3, "each side has its own name for it"
    assert journey["end"] == "ok" and lanes["prefill"]["end"] == lanes["decode"]["end"] == "delivered"
    stages = {stage["name"]: stage for stage in journey["stages"]}
    assert set(stages) >= AT_ROUTER | AT_P | AT_D | (set() if pushed else {"first_byte"}), sorted(stages)
    for stage in stages.values():
        assert -0.001 <= stage["begin_s"] <= stage["end_s"] <= journey["seconds"] + 5, stage
    assert stages["compute"]["end_s"] > stages["compute"]["begin_s"], "also where all is leased at its end (pull)"
    assert journey["bytes"] > 0 and journey["transport"] and 0 < journey["transfer_share"] <= 1
    at = {seat: {step: when for step, when, _ in lane["moments"]} for seat, lane in lanes.items()}
    _in_order(at["router"], "received", "chosen", "prefill_sent", "first_byte", "ended")
    _in_order(at["prefill"], "accepted", "scheduled", "complete")
    _in_order(at["prefill"], "begun", "complete", "committed", "closed", "rested")
    _in_order(at["decode"], "asked", "claimed", "granted", "allocated", "copied", "ended", "taken")


def _in_order(moments: Mapping[str, float], *steps: str) -> None:
    times = [moments[step] for step in steps]
    assert times == sorted(times), dict(zip(steps, times, strict=True))


def inspect_whole(router: str, count: int, mode: str, pushed: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """The last journeys, once each is whole: what P and D tell comes a moment later, on a busy machine seconds."""
    deadline = time.monotonic() + WHOLE_S
    while True:
        status, found = inspect("--last", str(count), "--router", router)
        try:
            assert status == 0 and len(journeys_of(found)) == count
            for journey in journeys_of(found):
                assert journey["mode"] == mode
                check_whole(journey, pushed=pushed(journey))
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
        else:
            return found


def journeys_of(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    listed: Sequence[Mapping[str, Any]] = found["journeys"]
    return listed
