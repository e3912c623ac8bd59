"""`kvbaton worker` in a process that can be held at named moments, and whose wall clock can be put off.

`python -m kvbaton_proof.chaos.worker_main SOCKET OPTIONS`, the options as JSON. What is held is what the product does
at its ports: a message that is about to be sent, a copy of which half has been made, a token that is about to be told.

Law: nothing but the time changes: every message is sent, every copy made and every token told, a second late at most.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbaton_proof.chaos.breakpoints import HOLD_S, Clock, Hello, Reached, Resume, Watch, to_worker
from kvbaton_proof.chaos.fault_catalogue import Moment

DIAL_S = 10.0
HALF_S = 0.5
"""How long the first half of a copy may take."""
FIRST_HALF = 1 << 60
"""Jobs of halves are numbered from here on, far from those of the product."""


class BreakpointClient:
    """This process's line to the conductor. `reached` blocks the thread that calls it, at most `HOLD_S`."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.off_s = 0.0
        self._watch: Watch | None = None
        self._resume = threading.Event()
        self._lock = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.settimeout(DIAL_S)
        self._line.connect(path)
        self._line.settimeout(None)
        self._send(Hello(name))
        threading.Thread(target=self._listen, name="chaos-breakpoints", daemon=True).start()

    def looks_for(self, moment: Moment, peer: str) -> bool:
        watch = self._watch
        return watch is not None and watch.moment is moment and watch.member in ("", self.name, peer)

    def reached(self, moment: Moment, peer: str, what: str) -> None:
        """This thread is at a moment of a handoff with `peer`; where the conductor looks for it, wait."""
        with self._lock:
            watch = self._watch
            if watch is None or not self.looks_for(moment, peer):
                return
            self._watch = None
            self._resume.clear()
        self._send(Reached(watch.number, self.name, what))
        self._resume.wait(HOLD_S)

    def _send(self, message: Hello | Reached) -> None:
        try:
            self._line.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:  # the conductor is gone, and with it soon this process
            self._resume.set()

    def _listen(self) -> None:
        with self._line.makefile("rb") as lines:
            for line in lines:
                order = to_worker.decode(line)
                if isinstance(order, Clock):
                    self.off_s = order.off_s
                    continue
                with self._lock:
                    self._watch = order if isinstance(order, Watch) else None
                if isinstance(order, Resume):
                    self._resume.set()


def hold_messages(held: BreakpointClient) -> None:
    """Moments at which a message is about to be sent."""
    control = importlib.import_module("kvbaton.control.zmq").ZmqControl
    messages = importlib.import_module("kvbaton.protocol.wire.messages")
    decode = importlib.import_module("kvbaton.protocol.wire.codec").decode
    failed = importlib.import_module("kvbaton.protocol.errors").ProtocolError
    send = control.send
    of_message = {
        messages.Claim: Moment.BEFORE_CLAIM,
        messages.Commit: Moment.BEFORE_COMMIT,
        messages.Written: Moment.BEFORE_COMMIT,  # where P writes, this is what says that the copy is complete
        messages.Ready: Moment.MID_STREAM,
    }

    def held_send(self: Any, worker: str, frame: bytes) -> bool:
        if any(held.looks_for(moment, worker) for moment in of_message.values()):
            message = None
            with contextlib.suppress(failed):  # what is said to the registry and to the store is not of this protocol
                message = decode(frame)[1]
            moment = of_message.get(type(message))
            if moment is not None and not getattr(message, "final", False):
                held.reached(moment, worker, f"{held.name}: {type(message).__name__} to {worker}")
        done: bool = send(self, worker, frame)
        return done

    control.send = held_send


class HalvedTransport:
    """Another transport, on which a copy that the conductor looks for is first made by half.

    A half that does not end soon stands for the whole: its end is told as the end of the copy, which has failed.
    """

    def __init__(self, inner: Any, held: BreakpointClient) -> None:
        self._inner = inner
        self._held = held
        self._kept: list[Any] = []  # what happened on `inner` while a half was awaited
        self._number = FIRST_HALF
        self._stuck: dict[int, int] = {}  # halves that did not end soon, and whose they are

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, copy: Any) -> bool:
        peer = str(copy.peer.worker).partition("#")[0]
        if self._held.looks_for(Moment.MID_COPY, peer) and copy.weave is None:
            is_made = self._make_half(copy)
            what = f"{self._held.name}: half of a {copy.direction.value} with {peer}"
            self._held.reached(Moment.MID_COPY, peer, what)
            if not is_made:
                return True
        done: bool = self._inner.submit(copy)
        return done

    def cancel(self, job: int) -> None:
        for one, whose in self._stuck.items():
            if whose == job:
                self._inner.cancel(one)
                return
        self._inner.cancel(job)

    def drain(self) -> Sequence[Any]:
        kept, self._kept = self._kept, []
        return [self._told(each) for each in (*kept, *self._inner.drain())]

    def _told(self, event: Any) -> Any:
        whose = self._stuck.get(getattr(event, "job", -1))
        if whose is None:
            return event
        told = msgspec.structs.replace(event, job=whose)
        if getattr(told, "reason", "") is None:
            return msgspec.structs.replace(told, reason=self._failed())
        return told

    def _failed(self) -> Any:
        return importlib.import_module("kvbaton.protocol.errors").Reason.TRANSFER_FAILED

    def _make_half(self, copy: Any) -> bool:
        """Whether it is over, one way or another; else the half stands for the whole."""
        self._number += 1
        job = self._number
        if not self._inner.submit(msgspec.structs.replace(copy, job=job, spans=half(copy.spans))):
            return True
        until = time.monotonic() + HALF_S
        while time.monotonic() < until:
            news = list(self._inner.drain())
            ends = [each for each in news if getattr(each, "job", None) == job]
            self._kept += [each for each in news if each not in ends]
            if ends and all(getattr(each, "at_rest", True) for each in ends):
                return True
            self._kept += ends
            if ends:
                break
            time.sleep(0.002)
        self._stuck[job] = copy.job
        return False


def half(spans: Any) -> Any:
    """The first half of flattened (local, remote, bytes) triples; of a single one, the first half of its bytes."""
    count = len(spans) // 3
    if count > 1:
        return spans[: count // 2 * 3]
    return type(spans)(spans.typecode, [spans[0], spans[1], max(1, spans[2] // 2)])


def hold_copies(held: BreakpointClient) -> None:
    planes = importlib.import_module("kvbaton.transports.catalogue")
    make = planes.make
    setattr(planes, "make", lambda *args: HalvedTransport(make(*args), held))  # noqa: B010 - in this process only


def hold_tokens(held: BreakpointClient) -> None:
    """The moment in mid-answer: some tokens are told, and more will be."""
    engine = importlib.import_module("kvbaton.engines.embedded.embedded_engine").Engine
    step = engine.step

    def held_step(self: Any) -> Any:
        outputs = step(self)
        goes_on = (each.token is not None and each.status is None for each in outputs)
        if held.looks_for(Moment.MID_STREAM, "") and any(goes_on):
            held.reached(Moment.MID_STREAM, "", f"{held.name}: a token of an answer that goes on")
        return outputs

    engine.step = held_step


def put_clock_off(held: BreakpointClient) -> Callable[[], float]:
    """The wall clock as this process sees it from now on. Before anything of the product is imported."""
    wall = time.time

    def off() -> float:
        return wall() + held.off_s

    return off


def main(path: str, options: str) -> int:
    held = BreakpointClient(msgspec.json.decode(options)["name"], path)
    time.time = put_clock_off(held)
    logs = importlib.import_module("kvbaton.processes.process_logs")
    logs.configure(logs.LogSettings())
    worker = importlib.import_module("kvbaton.engines.embedded.embedded_worker")
    hold_messages(held)
    hold_copies(held)
    hold_tokens(held)
    kind = importlib.import_module("kvbaton.engines.embedded.worker_options").WorkerOptions
    status: int = worker.main(msgspec.json.decode(options, type=kind))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
