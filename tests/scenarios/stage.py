"""Engines, doors and nodes of the simulator, stepped by hand: for rules about who may do what, and when.

`engines p d` instead of `workers p d`. Nothing moves by itself: `engine p` is one step of P's scheduler, `node p` one
turn of its loop, `time 0.1` lets devices compute, copies move and frames arrive, `go 2` is all of it for two seconds.
What each of them did is told.
"""

from __future__ import annotations

from typing import Any

import msgspec
from party import transfer
from transcript import effect_text, message_text

from kvbaton.node.doorway import DropBlocks, LoadReport, UnpinBlocks
from kvbaton.protocol import effects as fx
from kvbaton.protocol.ids import RequestId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.codec import decode
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.sim.checks.checkers import _check_life
from kvbaton_proof.sim.world.life import TICKET_KEY, Character, Life
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_network import Network, NetworkFaults
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.sim_transport import Fabric, TransportFaults
from kvbaton_proof.sim.world.world import World

REST_S, LAST_S = 0.05, 3.0


class Still(Life):
    """A life that nobody wakes."""

    def wake(self) -> None: ...

    def wake_engine(self) -> None: ...


class Stage:
    """Two workers and the time."""

    def __init__(self, names: list[str], options: dict[str, str]) -> None:
        self.world = World(0)
        self.network = Network(self.world, NetworkFaults())
        self.fabric = Fabric(self.world, TransportFaults())
        self.network.deliver = lambda source, target, frame: self.lives[target].receive(source, frame)
        self.told: list[str] = []
        self.tickets: dict[str, str] = {}
        self.names: list[str] = []  # of handoffs
        self.lives: dict[WorkerId, Life] = {}
        for name in names:
            self._add(WorkerId(name), int(options.get("ranks", 1)), int(options.get("depth", 1)))

    def play(self, verb: str, words: list[str], options: dict[str, str]) -> str:
        self.told.clear()
        getattr(self, "do_" + verb)(words, options)
        return "\n".join(self.told)

    # --- commands

    def do_prefill(self, words: list[str], options: dict[str, str]) -> None:
        """`prefill p 1 tokens=4 [stream]`: a prompt for P's engine."""
        tokens, mode = int(options.get("tokens", 4)), "stream" if "stream" in words else "pull"
        ticket = ""
        if mode == "stream":
            handoff = handoff_id(TransferId(f"{int(words[1]):032x}"))
            ticket = self.tickets[words[1]] = seal(Ticket(handoff, WorkerId("p"), 60.0), TICKET_KEY)
        self._request(words, tokens, "prefill", mode=mode, ticket=ticket)

    def do_decode(self, words: list[str], options: dict[str, str]) -> None:
        """`decode d 1 tokens=4`: the same prompt for D's engine, with the ticket."""
        self._request(words, int(options.get("tokens", 4)), "decode", ticket=self.tickets[words[1]])

    def do_abort(self, words: list[str], options: dict[str, str]) -> None:
        self.lives[WorkerId(words[0])].engine.abort(RequestId(words[1]))

    def do_engine(self, words: list[str], options: dict[str, str]) -> None:
        life = self.lives[WorkerId(words[0])]
        free = len(life.engine.pool.free)
        life._step_engine()
        pool, flying = life.engine.pool, len(life.engine._in_flight)
        self._tell(life, f"{free} -> {len(pool.free)} blocks free, {flying} steps in flight, " + _word(life))

    def do_node(self, words: list[str], options: dict[str, str]) -> None:
        self.lives[WorkerId(words[0])]._step_node()

    def do_time(self, words: list[str], options: dict[str, str]) -> None:
        self.world.run(self.world.now + float(words[0]))

    def do_slow(self, words: list[str], options: dict[str, str]) -> None:
        """`slow 3`: copies take up to so many seconds from now on."""
        self.fabric.faults = TransportFaults(slow=1.0, slow_s=float(words[0]))

    def do_loop(self, words: list[str], options: dict[str, str]) -> None:
        """`loop d 2`: its loop turns for two seconds, and its engine does not."""
        for _ in range(int(float(words[1]) / REST_S)):
            self.world.run(self.world.now + REST_S)
            for name in words[0].split(","):
                self.lives[WorkerId(name)]._step_node()

    def do_go(self, words: list[str], options: dict[str, str]) -> None:
        for _ in range(int(float(words[0]) / REST_S)):
            self.world.run(self.world.now + REST_S)
            for life in self.lives.values():
                life._step_node()
                life._step_engine()

    def do_rest(self, words: list[str], options: dict[str, str]) -> None:
        self.do_go([str(LAST_S)], options)
        for life in self.lives.values():
            _check_life(life)
        self.told.append("everything is at rest")

    # --- helpers

    def _tell(self, life: Life, text: str) -> None:
        self.told.append(f"  {life.peer.worker}       {text}")

    def _request(self, words: list[str], tokens: int, role: str, **more: Any) -> None:
        life, number = self.lives[WorkerId(words[0])], words[1]

        def over(how: str, detail: str) -> None:
            if how == "prefilled" and detail:
                self.tickets[number] = detail
            self._tell(life, f"{number} is {how}" + (" and gives a ticket" if how == "prefilled" and detail else ""))

        life.engine.add(SimRequest(RequestId(number), int(number), tokens, role, over, **more))

    def _add(self, name: WorkerId, ranks: int, depth: int) -> None:
        settings = Settings(lease_s=3.0, max_hold_s=30.0, transfer_timeout=20.0)
        character = Character(name, Shape(ranks=ranks), ("tcp",), settings, depth=depth)
        life = self.lives[name] = Still(self.world, character, self.network, self.fabric)
        self.network.names.add(name)
        self._listen(life)

    def _listen(self, life: Life) -> None:
        """Tell what its node says and has done, and what its engine does for it."""
        do, send, duties = life.node._do, self.network.send, life.doorway.duties

        def done(effect: Any) -> None:
            if not isinstance(effect, fx.Send):
                self._tell(life, effect_text(effect))
            do(effect)

        def sent(source: WorkerId, target: WorkerId, frame: bytes) -> None:
            message = decode(frame)[1]
            name = getattr(message, "handoff", "")
            if name and name not in self.names:
                self.names.append(name)
            if name:  # numbered as they come
                message = msgspec.structs.replace(message, handoff=transfer(self.names.index(name) + 1))
            self.told.append(f"  {source} -> {target}  {message_text(message)}")
            send(source, target, frame)

        def told() -> list[Any]:
            found = duties()
            for duty in found:
                self._tell(life, f"the engine {_duty(duty)}")
            return found

        life.node._do = done  # type: ignore[method-assign]
        life.doorway.duties = told  # type: ignore[method-assign]
        if self.network.send.__name__ != "sent":
            self.network.send = sent  # type: ignore[method-assign]


def _duty(duty: object) -> str:
    if isinstance(duty, UnpinBlocks):
        return f"unpins {' '.join(map(str, duty.blocks))}"
    if isinstance(duty, DropBlocks):
        return f"lets go of {' '.join(map(str, duty.blocks))}"
    assert isinstance(duty, LoadReport)
    return f"hears from rank {duty.rank} that {duty.request} {'is there' if duty.end.delivered else 'has failed'}"


def _word(life: Life) -> str:
    """What an engine says of itself (rule 19)."""
    return "to be stepped again" if life.engine.busy else "need not be stepped"
