"""A node between a ledger that says what is written here, and ports that note what they are asked and throw if told."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import AGAIN_S, Node
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, PutId, WorkerId, rank_peer
from kvbaton.transports.core.transport import FenceEnded, OpenFailed
from kvbaton_proof.sim.questions.exam import Question, same
from kvbaton_proof.sim.questions.exam_cards import base, identity
from kvbaton_proof.sim.questions.interview import KEY, ev, fx, m
from kvbaton_proof.sim.world.sim_transport import KINDS

_R = Reason
PEER, OTHER = PeerId(WorkerId("d0"), Incarnation(7)), PeerId(WorkerId("d1"), Incarnation(8))
LINK, SESSION = ("link", 1), ("session", 2)


class Port:
    """Notes every call; `room` copies are taken; what is in `throws` raises, once or `always`."""

    send: Any
    receive: Any

    def __init__(self, name: str, calls: list[Any], enforces: bool = False) -> None:
        self.name, self.calls, self.room = name, calls, 99
        self.news: list[Any] = []
        self.throws: dict[str, Exception] = {}
        self.capabilities = SimpleNamespace(enforces=enforces, lends_writes=enforces)

    def _called(self, what: str, *arguments: Any) -> None:
        self.calls.append((self.name, what, *arguments))
        if what in self.throws:
            raise self.throws.pop(what)

    def endpoint(self, peer: PeerId) -> bytes:
        self._called("endpoint", peer)
        return f"{self.name}>{peer.worker}".encode()

    def submit(self, copy: Any) -> bool:
        if self.room:
            self._called("submit", int(copy.job))
            self.room -= 1
            return True
        return False

    def drain(self) -> list[Any]:
        if "drain" in self.throws:
            raise self.throws.pop("drain")
        news, self.news = self.news, []
        return news

    def __getattr__(self, what: str) -> Any:
        return lambda *arguments: self._called(what, *arguments)


class Script:
    """In the ledger's place: hears everything, says what it was given to say after the next input."""

    def __init__(self) -> None:
        self.desk = SimpleNamespace(identity=identity(base(2), (KINDS["shm"], KINDS["tcp"])))
        self.heard: list[Any] = []
        self.effects: list[Any] = []
        self.due: float | None = None

    def on_event(self, event: Any, now: float) -> None:
        self.heard.append(event)

    def on_frame(self, worker: str, frame: bytes, now: float) -> None:
        self.heard.append(frame)

    def on_time(self, now: float) -> None:
        self.heard.append(now)

    def take_effects(self) -> list[Any]:
        effects, self.effects = self.effects, []
        return effects

    def next_deadline(self) -> float | None:
        return self.due

    def leave(self, now: float) -> None:
        self.heard.append("leaves")


class Stage:
    """Two ranks with two planes each, a door, a store and a control port."""

    def __init__(self, rng: random.Random) -> None:
        self.now = float(rng.randint(1, 50))
        self.calls: list[Any] = []
        self.script = Script()
        self.ranks = [
            {name: Port(f"{name}{n}", self.calls, name == "tcp") for name in ("shm", "tcp")} for n in range(2)
        ]
        self.control, self.store = Port("control", self.calls), Port("store", self.calls)
        self.frames: list[Any] = []
        self.sends = True
        self.control.send = self._send
        self.control.receive = self._receive
        config = DoorwayConfig(PEER, 2, 1, (KEY,), 5.0, lambda: "0" * 32, lambda: 1000.0)  # type: ignore[arg-type, return-value]
        self.door = Doorway(config, EpochTable(4))
        self.faults: list[str] = []
        self.said: list[Any] = []
        ports: Any = self.ranks
        self.node = Node(self.script, self.control, ports, self.door, self.store, self._fault)  # type: ignore[arg-type]
        self.node.say = lambda *words: self.said.append(words)

    def _fault(self, what: str, count: int, error: Exception) -> None:
        self.faults.append(what)

    def _send(self, worker: str, frame: bytes) -> bool:
        self.calls.append(("control", "send", worker))
        return self.sends

    def _receive(self) -> list[Any]:
        if "receive" in self.control.throws:
            raise self.control.throws.pop("receive")
        frames, self.frames = self.frames, []
        return frames

    def step(self, *effects: Any, after: float = 0.0) -> list[Any]:
        """One step in which the ledger says these; what the ports were asked."""
        self.now += after
        self.calls.clear()
        self.script.heard.clear()
        self.script.effects = list(effects)
        self.node.step(self.now)
        return list(self.calls)

    @property
    def heard(self) -> list[Any]:
        return [each for each in self.script.heard if each != self.now]


def copy(job: int, direction: fx.Direction = fx.Direction.READ) -> fx.Copy:
    return fx.Copy(JobId(job), rank_peer(PEER, 0), direction, 0, 0, array("q"))


def start(job: int, rank: int = 1, plane: str = "shm") -> fx.StartCopy:
    return fx.StartCopy(rank, plane, copy(job))


def order(rng: random.Random) -> None:
    """What was noted comes before what is received, the engine's before the ranks', and time after all (rule 8)."""
    s = Stage(rng)
    s.frames = [(WorkerId("d0"), b"frame"), (WorkerId("d0"), b"another")]
    s.ranks[0]["tcp"].news = [ev.CopyEnded(JobId(1))]
    s.ranks[1]["shm"].news = [FenceEnded(rank_peer(PEER, 1)), ev.CopyRested(JobId(2))]
    s.store.news = [ev.StoreEnded(PutId(3))]
    s.node.extra = lambda: [ev.LeaseCompleted(LeaseId(4))]
    s.node.tell(ev.DrainStarted())
    s.door.cache_replaced()
    s.step()
    same("the order of what is heard", s.script.heard, [
        ev.DrainStarted(), ev.CacheReplaced(), ev.CopyEnded(JobId(1)), ev.RankFenced(1, rank_peer(PEER, 1)),
        ev.CopyRested(JobId(2)), ev.StoreEnded(PutId(3)), ev.LeaseCompleted(LeaseId(4)), b"frame", b"another", s.now,
    ])  # fmt: skip
    s.node.extra = None
    s.node.set_wall(500.0, s.now)
    same("the wall clock", s.script.desk.identity.wall_offset_s, 500.0 - s.now)
    s.control.throws["receive"] = OSError()
    s.node.tell(ev.DrainStarted())
    s.step()
    same("a control port that throws", (s.heard, s.faults), ([ev.DrainStarted()], ["receive"]))
    s.ranks[0]["shm"].throws["drain"] = OSError()
    s.store.throws["drain"] = OSError()
    s.ranks[1]["tcp"].news = [ev.CopyEnded(JobId(5))]
    s.step()
    same("planes that throw", (s.heard, s.faults[1:]), ([ev.CopyEnded(JobId(5))], ["drain.shm", "drain.store"]))


def effects(rng: random.Random) -> None:
    """Each effect is carried out by whom it names, and in order."""
    s = Stage(rng)
    loan = fx.Loan(JobId(9), PEER, fx.Direction.READ, ((1,),))
    found = s.step(
        start(1), fx.CancelCopy(0, "tcp", JobId(2)), fx.Lend(1, "tcp", loan), fx.StartFence(0, "shm", PEER),
        fx.StorePut(PutId(3), ((1,),), (b"k",), ("x",)), fx.CancelPut(PutId(3)), fx.Unpin(LeaseId(5)),
        fx.Send(PEER.worker, PEER.incarnation, 4, m.Linked()),
    )  # fmt: skip
    same("what the ports are asked", found, [
        ("shm1", "submit", 1), ("tcp0", "cancel", 2), ("tcp1", "lend", loan), ("shm0", "fence", PEER),
        ("store", "put", 3, ((1,),), (b"k",), ("x",)), ("store", "cancel", 3), ("control", "send", "d0"),
    ])  # fmt: skip
    same("what the engine is told", list(s.door._to_engine), [fx.Unpin(LeaseId(5))])
    s.sends = False
    s.step(fx.Send(PEER.worker, PEER.incarnation, 4, m.Linked()))
    same("nobody of that name", s.heard, [ev.Departed(PEER.worker, reason=_R.PEER_UNKNOWN)])
    s.step(fx.GivenUp(PEER.worker, "shm", "words"))
    same("who looks after it is told", len(s.said), 1)
    s.node.close(s.now)
    same(
        "who leaves shuts its planes",
        [call[:2] for call in s.calls if call[1] == "close"],
        [(f"{name}{n}", "close") for n in range(2) for name in ("shm", "tcp")],
    )
    same("and says so", "leaves" in s.script.heard, True)
    s.node.store = None
    s.step(fx.StorePut(PutId(6), ((1,),), (b"k",)), fx.CancelPut(PutId(6)))
    same("without a store", s.heard, [ev.StoreEnded(PutId(6), _R.STORE_FAILED)])


def backlog(rng: random.Random) -> None:
    """What a plane has no room for waits, in order; what is cancelled meanwhile ends, and is never begun."""
    s = Stage(rng)
    plane = s.ranks[1]["shm"]
    plane.room = 1
    same("as many as it takes", s.step(start(1), start(2), start(3), start(4)), [("shm1", "submit", 1)])
    same("another rank takes its own", s.step(start(5, 0)), [("shm0", "submit", 5)])
    s.step(fx.CancelCopy(1, "shm", JobId(3)))
    same("one that waits is cancelled", s.heard, [ev.CopyEnded(JobId(3), _R.CANCELLED)])
    plane.room = 9
    plane.throws["submit"] = OSError("words")
    same("there is room again", s.step(), [("shm1", "submit", 2), ("shm1", "submit", 4)])
    same("one could not be started", s.heard, [ev.CopyEnded(JobId(2), _R.TRANSFER_FAILED, detail="OSError: words")])
    same("one that was begun is cancelled", s.step(fx.CancelCopy(1, "shm", JobId(4))), [("shm1", "cancel", 4)])
    same("and none is left", s.step(), [])


def throws(rng: random.Random) -> None:
    """A port that throws costs what it was asked; a stop, a fence and a farewell are asked for again."""
    s = Stage(rng)
    asked = [fx.CancelCopy(0, "tcp", JobId(2)), fx.StartFence(1, "shm", PEER), fx.CancelPut(PutId(3))]
    calls = [("tcp0", "cancel", 2), ("shm1", "fence", PEER), ("store", "cancel", 3)]
    s.ranks[0]["tcp"].throws["cancel"] = s.ranks[1]["shm"].throws["fence"] = s.store.throws["cancel"] = OSError()
    same("asked", s.step(*asked), calls)
    same("faults", s.faults, ["CancelCopy", "StartFence", "CancelPut"])
    same("when they are asked again", s.node.next_deadline(), s.now + AGAIN_S)
    s.script.due = s.now + 0.05
    same("what is due sooner", s.node.next_deadline(), s.script.due)
    s.script.due = None
    same("not yet", s.step(after=AGAIN_S / 2), [])
    same("asked again", s.step(after=AGAIN_S / 2 + 0.001), calls)
    same("and not for ever", (s.step(after=1.0), s.node.next_deadline()), ([], None))
    s.ranks[1]["tcp"].throws["lend"] = OSError("words")
    s.step(fx.Lend(1, "tcp", fx.Loan(JobId(9), PEER, fx.Direction.READ, ((1,),))))
    same("nothing was lent", s.heard, [ev.CopyEnded(JobId(9), _R.TRANSFER_FAILED, detail="OSError: words")])
    s.store.throws["put"] = OSError()
    s.step(fx.StorePut(PutId(4), ((1,),), (b"k",)))
    same("nothing is stored", s.heard, [ev.StoreEnded(PutId(4), _R.STORE_FAILED)])
    s.ranks[0]["shm"].throws["close"] = OSError()
    s.node.close(s.now)
    same("all are closed", sum(call[1] == "close" for call in s.calls), 4)


def connections(rng: random.Random) -> None:
    """Every rank to every rank of the other, and for as long as anybody holds it."""
    s = Stage(rng)
    ends = tuple(b"%d" % n for n in range(6))
    found = s.step(fx.Connect(PEER, "shm", 3, ends, LINK))
    pairs = [
        (f"shm{n}", "connect", rank_peer(PEER, remote), ends[remote * 2 + n]) for remote in range(3) for n in range(2)
    ]
    same("who is connected how", found, pairs)
    s.step(fx.Connect(PEER, "shm", 3, ends, SESSION))
    same("one lets go", s.step(fx.Disconnect(PEER, "shm", 3, LINK)), [])
    parts = [(f"shm{n}", "disconnect", rank_peer(PEER, remote)) for n in range(2) for remote in range(3)]
    same("the last lets go", s.step(fx.Disconnect(PEER, "shm", 3, SESSION)), parts)
    s.step(
        fx.Connect(PEER, "shm", 1, ends, LINK),
        fx.Connect(PEER, "shm", 1, ends, SESSION),
        fx.Connect(OTHER, "shm", 1, ends, LINK),
    )
    s.ranks[1]["shm"].news = [OpenFailed(rank_peer(PEER, 0), "late")]
    s.step()
    same(
        "a plane that could not be opened",
        s.heard,
        [ev.PlaneFailed(PEER, holder, "late") for holder in (LINK, SESSION)],
    )
    s.step(fx.Disconnect(PEER, "shm", 1, LINK))
    s.ranks[0]["shm"].throws["disconnect"] = OSError()
    same("a farewell that throws", len(s.step(fx.Disconnect(PEER, "shm", 1, SESSION))), 2)
    again = s.step(after=AGAIN_S + 0.001)
    same("is said again", again, [(f"shm{n}", "disconnect", rank_peer(PEER, 0)) for n in range(2)])
    s.ranks[0]["shm"].throws["disconnect"] = OSError()
    s.step(fx.Disconnect(OTHER, "shm", 1, LINK))
    s.step(fx.Connect(OTHER, "shm", 1, ends, SESSION))
    same("unless somebody holds it again", s.step(after=AGAIN_S + 0.001), [])
    for error, faults in ((ValueError("words"), []), (OSError("words"), ["Connect"])):
        s.faults.clear()
        s.ranks[1]["tcp"].throws["connect"] = error
        s.step(fx.Connect(PEER, "tcp", 1, ends, LINK))
        same("one that cannot be opened", (s.heard, s.faults), ([ev.PlaneFailed(PEER, LINK, "words")], faults))


def invitations(rng: random.Random) -> None:
    """Who is invited is told how each rank is reached; not before a fence of it that is owed."""
    s = Stage(rng)
    invited = fx.Invitation(PEER, "shm", 2, LINK)
    send = fx.Send(PEER.worker, PEER.incarnation, 4, m.Joined(()), invited)
    asked = [(f"shm{n}", "endpoint", rank_peer(PEER, remote)) for n in range(2) for remote in range(2)]
    same("endpoints", s.step(send), [*asked, ("control", "send", "d0")])
    let_go = [(f"shm{n}", "disconnect", rank_peer(PEER, remote)) for n in range(2) for remote in range(2)]
    same("who was invited is held", s.step(fx.Disconnect(PEER, "shm", 2, SESSION)), [])
    same("until it is let go", s.step(fx.Disconnect(PEER, "shm", 2, LINK)), let_go)
    for error, news in ((TimeoutError(), []), (OSError("words"), [ev.PlaneFailed(PEER, LINK, "words")])):
        s.ranks[0]["shm"].throws["endpoint"] = error
        same("a rank that cannot say", s.step(send)[-1][1], "endpoint")
        same("what follows", (s.heard, s.faults.pop()), (news, "Send"))
    s.step(after=1.0)
    fence = fx.StartFence(0, "shm", rank_peer(PEER, 1))
    s.ranks[0]["shm"].throws["fence"] = OSError()
    s.step(fence)
    same(
        "a fence that is owed comes first",
        s.step(send),
        [("shm0", "fence", rank_peer(PEER, 1)), *asked, ("control", "send", "d0")],
    )
    same("and once", s.step(after=1.0), [])
    s.ranks[0]["shm"].throws["fence"] = OSError()
    s.step(fence)
    s.ranks[0]["shm"].throws["fence"] = OSError()
    same("one that is owed still", s.step(send), [("shm0", "fence", rank_peer(PEER, 1))])
    same("is asked for again", s.step(after=1.0), [("shm0", "fence", rank_peer(PEER, 1))])


def laid_out(rng: random.Random) -> None:
    """Planes that lend are told where blocks are, and if that fails nothing can be lent."""
    s = Stage(rng)
    s.calls.clear()
    s.node._lay_out()
    same("who is told", [call[:2] for call in s.calls], [("tcp0", "lay_out")] * 2 + [("tcp1", "lay_out")] * 2)
    same("first nothing, then all", [bool(call[2]) for call in s.calls], [False, True] * 2)
    s.step(
        fx.Send(
            PEER.worker,
            PEER.incarnation,
            0,
            m.Welcome(1, s.script.desk.identity.card(), "shm", ()),
            fx.Invitation(PEER, "shm", 1, SESSION),
        )
    )
    same("a welcome holds as well", s.step(fx.Disconnect(PEER, "shm", 1, LINK)), [])


BANK: list[Question] = [order, effects, backlog, throws, connections, invitations, laid_out]
