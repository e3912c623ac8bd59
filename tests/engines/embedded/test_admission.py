"""Room to pin at P, and D's account of its prompts, on real engines: who waits, who is refused, who computed what."""

from __future__ import annotations

from kvbaton.api.params import LEASE_FOR_PULL, Mode, TransferParams
from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Output, RequestStatus, Sampling
from kvbaton.engines.embedded.memory.kv_layout import content_of
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.pin_budget import ANY_PEER, PinBudget
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.content import digest as digest_of
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, RequestId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal

from .helpers import TINY, prompt

KEY = b"k" * 32
BLOCKS, BLOCK_TOKENS = 64, 8


class Rig:
    """An engine with the real connector, whose node is the test."""

    def __init__(self, blocks_max: float = 20, wait_s: float = 5.0) -> None:
        self.now = 0.0
        me = PeerId(WorkerId("w"), Incarnation(1))
        config = DoorwayConfig(me, 1, 1, (KEY,), 60.0, lambda: TransferId("ab" * 16), lambda: 1000.0)
        self.door = Doorway(config, EpochTable(BLOCKS))
        self.door.budget = PinBudget(blocks_max, wait_s, waiting_max=2)
        self.door.holder_of = lambda ticket: ANY_PEER  # type: ignore[method-assign]
        engine = EngineConfig(TINY, CacheConfig(blocks=BLOCKS, block_tokens=BLOCK_TOKENS))
        self.subject = EmbeddedConnector(self.door, engine, clock=lambda: self.now)
        self.engine = Engine(engine, self.subject)

    def add(self, name: str, tokens: int, handoff: object, answer: int = 1, said: str = "unasked") -> EngineRequest:
        sampling = Sampling(max_tokens=answer, ignore_eos=True)
        request = EngineRequest(RequestId(name), prompt(len(name) + tokens, tokens), sampling, "", handoff, said)
        self.engine.add_request(request)
        return request

    def steps(self, count: int = 4) -> dict[str, RequestStatus]:
        ends: list[Output] = []
        for _ in range(count):
            ends += [output for output in self.engine.step() if output.status is not None]
        return {str(output.request_id): output.status for output in ends if output.status is not None}

    def posted(self, kind: type) -> list[ev.Event]:
        return [event for event in self.door.take_events() if isinstance(event, kind)]


PULL = TransferParams.parse(LEASE_FOR_PULL)


def ticket(request: EngineRequest | None = None, target: str = "") -> str:
    digest = b"" if request is None else digest_of(content_of(request, len(request.prompt)))
    unique = handoff_id(TransferId("cd" * 16))
    made = Ticket(unique, WorkerId("w"), 2000.0, Incarnation(1), LeaseId(9), digest=digest, target=WorkerId(target))
    return seal(made, KEY)


def test_a_prompt_waits_until_handoffs_pin_less_and_is_computed_then() -> None:
    rig = Rig(blocks_max=20)
    rig.add("a", 100, PULL)  # 13 blocks
    rig.add("b", 100, PULL)
    assert rig.steps() == {"a": RequestStatus.LENGTH}
    assert (rig.door.budget.pinned_blocks, rig.door.budget.waiting) == (13, 1)
    rig.door.hand_in(fx.Unpin(LeaseId(1)))
    assert rig.steps() == {"b": RequestStatus.LENGTH}
    rig.door.hand_in(fx.Unpin(LeaseId(2)))
    rig.steps()
    rig.engine.validate()
    assert rig.door.budget.pinned_blocks == rig.door.budget.promised_blocks == 0


def test_a_prompt_that_waited_too_long_is_refused_and_holds_nothing() -> None:
    rig = Rig(blocks_max=20, wait_s=5)
    rig.add("a", 100, PULL)
    rig.add("b", 100, PULL)
    rig.steps()
    rig.now = 5.0
    assert rig.steps() == {"b": RequestStatus.REFUSED}
    assert not rig.engine.scheduler.sequences
    assert rig.door.budget.waiting == 0
    assert rig.door.pinned_blocks == 13
    rig.add("b", 30, None)  # its name is free, and what is handed to nobody needs no room
    assert rig.steps() == {"b": RequestStatus.LENGTH}


def test_more_than_may_wait_are_refused_at_once() -> None:
    rig = Rig()
    for name in "abcd":
        rig.add(name, 100, PULL)
    assert rig.steps() == {"a": RequestStatus.LENGTH, "d": RequestStatus.REFUSED}


def test_an_abort_gives_the_room_to_the_next() -> None:
    rig = Rig()
    rig.add("a", 100, PULL)
    rig.steps()
    rig.add("b", 100, PULL)
    rig.add("c", 30, PULL)
    assert rig.steps() == {}  # b does not fit, and c, which would, does not pass it
    rig.engine.abort(RequestId("b"))
    assert rig.steps() == {"b": RequestStatus.ABORTED, "c": RequestStatus.LENGTH}


def test_a_d_that_waits_for_a_refused_prompt_is_told() -> None:
    rig = Rig()
    rig.add("a", 100, PULL)
    rig.steps()
    streamed = TransferParams(do_remote_decode=True, mode=Mode.STREAM, ticket=ticket(target="d"))
    rig.add("b", 100, streamed)
    rig.steps()
    rig.posted(ev.LeaseBegun)
    rig.now = 5.0
    rig.steps(1)
    assert rig.posted(ev.SourceEnded) == [ev.SourceEnded(LeaseId(2), Reason.PINS_FULL)]
    rig.door.hand_in(fx.Unpin(LeaseId(2)))
    rig.steps(1)
    assert rig.door.pinned_blocks == 13


def test_what_a_stream_pins_is_counted_once() -> None:
    rig = Rig(blocks_max=14)
    streamed = TransferParams(do_remote_decode=True, mode=Mode.STREAM, ticket=ticket(target="d"))
    rig.add("a", 100, streamed)
    assert rig.steps() == {"a": RequestStatus.LENGTH}
    assert (rig.door.budget.pinned_blocks, rig.door.budget.promised_blocks) == (13, 0)


def account(rig: Rig) -> tuple[dict[str, int], dict[str, int]]:
    figures = rig.subject.prompts.figures()
    return {name: count for name, count in figures["prompt_tokens_total"].items() if count}, figures[
        "alone_tokens_total"
    ]


def test_a_prompt_that_nobody_asked_p_for_is_d_alone() -> None:
    rig = Rig()
    rig.add("a", 50, None)
    rig.steps()
    assert account(rig) == ({"planned": 1, "alone": 49}, {"unasked": 49})
    rig.add("a", 50, None)  # the same again: whole blocks are cached
    rig.steps()
    assert account(rig) == ({"cached": 48, "planned": 2, "alone": 50}, {"unasked": 50})


def test_a_short_prompt_is_planned_by_the_routers_word() -> None:
    rig = Rig()
    rig.add("a", 50, None, said="short")
    rig.steps()
    assert account(rig) == ({"planned": 50}, {})


def test_a_prompt_computed_for_others_is_not_ds() -> None:
    rig = Rig()
    rig.add("a", 50, PULL)
    rig.steps()
    assert account(rig) == ({}, {})


def taken(rig: Rig, end: fx.End | None) -> None:
    """A request comes with a ticket; P grants it, and the load ends so. None: P's answer is a refusal."""
    request = EngineRequest(RequestId("d"), prompt(1, 50), Sampling(max_tokens=1, ignore_eos=True))
    params = TransferParams(do_remote_prefill=True, ticket=ticket(request))
    request = EngineRequest(request.request_id, request.prompt, request.sampling, "", params)
    rig.engine.add_request(request)
    rig.steps(1)
    if end is None:
        rig.door.hand_in(fx.MatchFailed(request.request_id, fx.End(Reason.PEER_GONE)))
    else:
        rig.door.hand_in(fx.MatchFound(request.request_id))
        rig.steps(1)
        rig.door.hand_in(fx.Report(request.request_id, end))
        rig.door.hand_in(fx.DropHold(request.request_id, HandoffId("")))
    rig.steps()


def test_a_delivered_prompt_is_handed_over() -> None:
    rig = Rig()
    taken(rig, fx.End())
    assert account(rig) == ({"handoff": 49, "planned": 1}, {})


def test_a_load_that_failed_is_counted_by_its_reason() -> None:
    rig = Rig()
    taken(rig, fx.End(Reason.STALE))
    assert account(rig) == ({"planned": 1, "alone": 49}, {"stale": 49})


def test_a_handoff_that_p_refused_is_counted_by_its_reason() -> None:
    rig = Rig()
    taken(rig, None)
    assert account(rig) == ({"planned": 1, "alone": 49}, {"peer_gone": 49})
