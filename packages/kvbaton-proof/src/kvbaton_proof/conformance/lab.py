"""Engines with names, keys and ports on this machine, and what must be true of them when a case is over.

Laws: everything is polled with a deadline. `settle` demands of every engine that each request ended, each block came
back, no hook raised and no fault was swallowed; a case may forgive only what it names.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.control import keyring
from kvbaton.protocol.ids import TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.conformance_oracle import answer
from kvbaton_proof.conformance.stores import Copies, LabStore, copies

NAMES = ("p0", "p1", "d0", "d1", "router")
IDENTITIES = (*NAMES, "store", "p0.1", "d0.1")  # second ranks have names of their own towards a store
PATIENCE_S = 20.0
LOADING = "WAITING_FOR_REMOTE_KVS"
"""What vLLM calls the status of a request that a D loads for."""
SETTINGS: dict[str, Any] = {
    "transport": "tcp",
    "lease_s": 5.0,
    "transfer_timeout": 5.0,
    "defer_timeout": 5.0,
    "claim_timeout": 3.0,
    "max_hold_s": 10.0,
}
_PAUSE_S = 0.0003
_PAUSE_MAX_S = 0.02
"""While nothing is computed, between two looks; the first few are shorter, since most waits are for a thread that is
about to answer, and the long ones for leases that run out: turning fast meanwhile would take half of the processors."""


class BrokenLabError(Exception):
    """What a case demands did not hold."""


def demand(holds: object, what: str) -> None:
    if not holds:
        raise BrokenLabError(what)


@functools.cache
def key_directory() -> Path:
    """One cluster's keys for the whole run; removed at its end."""
    import atexit

    base = Path(tempfile.mkdtemp(prefix="kvbaton-conformance-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    keyring.mint(base / "keys", IDENTITIES)
    return base / "keys"


PORTS_EACH = 400
_ports: dict[int, Iterator[int]] = {}  # by process: a fork begins its own


def free_port() -> int:
    """A port that nobody has, outside what the kernel hands out. Each process takes them in turn from a stretch of its
    own, so that neither two of one lab nor two labs side by side get the same."""
    mine = _ports.get(os.getpid())
    if mine is None:
        first = 12000 + os.getpid() % (20000 // PORTS_EACH) * PORTS_EACH
        mine = _ports[os.getpid()] = itertools.cycle(range(first, first + PORTS_EACH))
    for port in itertools.islice(mine, PORTS_EACH):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among {PORTS_EACH}")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Tokens that no other (length, seed) begins with."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, 1000) for _ in range(length)]


def router_ticket(source: str = "p0", target: str = "d0", *, ttl_s: float = 60.0, max_readers: int = 1) -> str:
    """As the router mints them, before P has begun."""
    handoff = handoff_id(TransferId(secrets.token_hex(16)))
    ticket = Ticket(handoff, WorkerId(source), time.time() + ttl_s, target=WorkerId(target), max_readers=max_readers)
    return seal(ticket, keyring.load(key_directory(), "router").ticket_keys[0])


def p_params(mode: str, ticket: str | None = None) -> dict[str, Any]:
    """As the router asks p0, for pull too with a ticket: who comes without one has half of the room to pin."""
    ticket = router_ticket() if ticket is None else ticket
    return {"do_remote_decode": True, "do_remote_prefill": False, "mode": mode, "ticket": ticket}


def d_params(mode: str, ticket: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, "mode": mode, "ticket": ticket}


def poll(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait without a step of anybody."""
    deadline = time.monotonic() + patience_s
    while not condition():
        demand(time.monotonic() < deadline, f"not within {patience_s:g} s: {what}")
        time.sleep(_PAUSE_S)


def leave_in_flight(engine: LabEngine) -> None:
    """A request is aborted whose next step has been scheduled and has not run."""
    gone = engine.add(prompt_of(90, 99), computes_all=True)
    while engine.runners[0].computed_of[gone] < engine.shape.chunk_tokens:
        engine.step()  # nobody else goes on meanwhile
    engine.abort(gone)


def landing_before_steps(engine: LabEngine, name: str, blocks: int) -> None:
    """From now on the device is slow: what is in flight runs once so many blocks of `name` have been loaded."""
    request, ids = engine.scheduler.requests[name], list[int]()
    poll(lambda: engine.connector.get_num_new_matched_tokens(request, 0)[0], "a match")
    told = engine.connector.update_state_after_alloc

    def allocated(request: Any, fresh: Any, external: int) -> None:
        told(request, fresh, external)
        if request.request_id == name and external > 0:
            ids.extend(fresh.get_block_ids()[0][:blocks])

    engine.connector.update_state_after_alloc = allocated
    engine.before_executing = lambda: poll(lambda: not engine.runners[0].memory.is_poisoned(0, ids), "it to land")


def reuse_all(engine: LabEngine) -> None:
    """Every free block is handed out once more and written over, as by requests that fill the cache."""
    blocks = engine.pool.get_new_blocks(engine.free_blocks)
    for runner in engine.runners:
        for group in range(len(runner.memory.groups)):
            runner.memory.poison(group, [block.block_id for block in blocks])
    engine.pool.free_blocks(blocks)


@dataclass
class LabHandoff:
    """One prompt on its way: its names on both sides."""

    mode: str
    prompt: list[int]
    at_p: str
    at_d: str
    ticket: str


@dataclass
class Lab:
    """The engines of one case. `overlapped`: each schedules a step while the one before it has not run yet. With one
    step at a time P has the V1 model runner's order of hooks and D the V2's; overlapped, the other way round."""

    overlapped: bool = False
    before_executing: Callable[[], None] = lambda: None
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in NAMES})
    engines: dict[str, LabEngine] = field(default_factory=dict)
    retired: list[LabEngine] = field(default_factory=list)
    stores: list[LabStore] = field(default_factory=list)

    def engine(self, name: str, shape: EngineShape | None = None, **settings: Any) -> LabEngine:
        """Start the engine `name`; one of that name that runs is stopped first, as in a restart."""
        if name in self.engines:
            self.stop(name)
        extra = {
            **SETTINGS,
            "name": name,
            "keys": str(key_directory()),
            "model_id": "no weights",
            "peers": {other: f"tcp://127.0.0.1:{port}" for other, port in self.ports.items() if other != name},
            "control_port": self.ports[name],
            **settings,
        }
        shape = shape or EngineShape()
        pipelined = shape.pipelined or self.overlapped
        if pipelined:  # a device that is late has computed no layer when its hook is called
            extra.setdefault("layerwise", False)
        runner: Any = "v1" if pipelined == name.startswith("p") else "v2"
        self.engines[name] = LabEngine(msgspec.structs.replace(shape, pipelined=pipelined, runner=runner), extra)
        self.engines[name].before_executing = self.before_executing
        return self.engines[name]

    def stop(self, name: str) -> None:
        engine = self.engines.pop(name)
        engine.close()
        self.retired.append(engine)

    def duo(
        self, p: EngineShape | None = None, d: EngineShape | None = None, **settings: Any
    ) -> tuple[LabEngine, LabEngine]:
        return self.engine("p0", p, **settings), self.engine("d0", d or p, **settings)

    def sharing(
        self, p: EngineShape | None = None, d: EngineShape | None = None, **settings: Any
    ) -> tuple[LabEngine, LabEngine]:
        """Two engines with a store between them: the last of `stores`, or a new one."""
        if not self.stores:
            self.stores.append(LabStore(key_directory()))
        return self.duo(p, d, store=self.stores[-1].url, **settings)

    # --- time

    def turn(self) -> bool:
        """One step of every engine that would take one; whether any of them computed something."""
        before = [runner.computed for engine in self.engines.values() for runner in engine.runners]
        for engine in list(self.engines.values()):
            engine.step()
        if before != [runner.computed for engine in self.engines.values() for runner in engine.runners]:
            return True
        time.sleep(_PAUSE_S)  # let the loops' threads have the processor
        return False

    def until(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline, idle = time.monotonic() + patience_s, 0
        while not condition():
            if time.monotonic() > deadline:
                raise BrokenLabError(f"not within {patience_s:g} s: {what}; {self.story()}")
            idle = 0 if self.turn() else idle + 1
            if idle:
                time.sleep(min(idle * _PAUSE_S / 1, _PAUSE_MAX_S))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.turn()

    # --- handoffs

    def hand_over(self, mode: str, prompt: Sequence[int], *, max_tokens: int = 4, p_first: bool = True) -> LabHandoff:
        """Begin a handoff: for pull P has finished; for the others both sides have just been told."""
        p, d, tokens = self.engines["p0"], self.engines["d0"], list(prompt)
        if mode == "pull":
            at_p, params = self.prefill(tokens)
            at_d = d.add(tokens, params, max_tokens=max_tokens)
            return LabHandoff(mode, tokens, at_p, at_d, params["ticket"])
        ticket = router_ticket()
        at_d = "" if p_first else d.add(tokens, d_params(mode, ticket), max_tokens=max_tokens)
        at_p = p.add(tokens, p_params(mode, ticket), max_tokens=1)
        at_d = at_d or d.add(tokens, d_params(mode, ticket), max_tokens=max_tokens)
        return LabHandoff(mode, tokens, at_p, at_d, ticket)

    @contextlib.contextmanager
    def loading(self, mode: str, prompt: Sequence[int], **options: Any) -> Iterator[tuple[Copies, LabHandoff]]:
        """A handoff that D has begun to load, and the tap that holds all copies."""
        d = self.engines["d0"]
        with copies() as tap:
            tap.hold()
            handoff = self.hand_over(mode, prompt, **options)
            self.until(lambda: d.status(handoff.at_d) == LOADING, "D to load")
            yield tap, handoff

    def prefill(self, prompt: Sequence[int], **options: Any) -> tuple[str, dict[str, Any]]:
        """P computes a prompt for pull; returns its id there and what P gives for D."""
        p = self.engines["p0"]
        at_p = p.add(prompt, p_params("pull"), max_tokens=options.pop("max_tokens", 1), **options)
        self.until(lambda: p.outcomes[at_p].reason, f"P's prefill {at_p}")
        params = p.outcomes[at_p].params
        demand(isinstance(params, dict) and params.get("ticket"), f"P gave no ticket: {p.outcomes[at_p]}")
        assert params is not None
        return at_p, params

    def finish(self, handoff: LabHandoff, *, loads: int | None = None, patience_s: float = PATIENCE_S) -> None:
        """The answer is the one that a single engine gives, after so many loads if that is said."""
        d = self.engines["d0"]
        self.until(lambda: d.outcomes[handoff.at_d].reason, f"an end of {handoff.mode} {handoff.at_d}", patience_s)
        self.right(d, handoff.at_d)
        if loads is not None:
            got = d.watch.loads[handoff.at_d]
            demand(got == loads, f"{handoff.at_d} was loaded {got} times, expected {loads}")

    def ended(self, engine: LabEngine, name: str, patience_s: float = PATIENCE_S) -> str:
        """Wait for a request's end and say how it ended."""
        self.until(lambda: engine.outcomes[name].reason, f"an end of {name}", patience_s)
        return str(engine.outcomes[name].reason)

    def answered(self, engine: LabEngine, name: str) -> None:
        """Wait for a request's end, which is the answer that a single engine gives."""
        self.ended(engine, name)
        self.right(engine, name)

    def right(self, engine: LabEngine, name: str) -> None:
        outcome = engine.outcomes[name]
        expected = answer(outcome.prompt, len(outcome.tokens))
        demand(outcome.tokens == expected and outcome.tokens, f"{name}: answered {outcome.tokens}, not {expected}")
        demand(outcome.reason in ("length", "stop"), f"{name} ended as {outcome.reason}")

    # --- the books

    def settle(self, patience_s: float = PATIENCE_S) -> None:
        """Every engine comes to rest by itself, with nothing left."""
        self.until(lambda: not any(engine.has_work for engine in self.engines.values()), "rest", patience_s)
        for name, engine in self.engines.items():
            unended = [each for each, outcome in engine.outcomes.items() if outcome.reason is None]
            demand(not unended, f"{name}: {unended} never ended")
            demand(engine.blocks_left == 0, f"{name}: {engine.blocks_left} blocks are held at rest")
            demand(not engine.scheduler.requests, f"{name}: vLLM still tracks {list(engine.scheduler.requests)}")
            most = 2 if self.stores else 1  # the store is a second source
            doubled = {each: n for each, n in engine.watch.loads.items() if n > most}
            demand(not doubled, f"{name}: loaded more than once: {doubled}")
        for engine in [*self.engines.values(), *self.retired]:
            demand(not engine.watch.errors, f"a hook raised {engine.watch.errors[:1]}")

    def story(self) -> str:
        """Where everything stands, in a line."""
        parts = []
        for name, engine in self.engines.items():
            live = {each: engine.status(each) for each, outcome in engine.outcomes.items() if outcome.reason is None}
            tracked = [each for each in engine.scheduler.requests if each not in live]
            pending = engine.connector.has_pending_push_work()
            held = f"held by vLLM {tracked}, {engine.blocks_left} blocks"
            parts.append(f"{name}: live {live}, {held}, pending {pending}, ends {dict(engine.ends)}")
        return "; ".join(parts)

    def close(self) -> None:
        """Stop all engines, at once: each waits for its threads."""
        engines = list(self.engines.values())
        with ThreadPoolExecutor(max(1, len(engines))) as threads:
            list(threads.map(LabEngine.close, engines))
        for store in self.stores:
            store.close()
