"""What the roles share: job ids that rise, copies with an owner, and rest as a fact (rule 17)."""

from __future__ import annotations

from array import array

from kvbaton.protocol.effects import CancelCopy, Direction, StartCopy
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.spans import Move
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.protocol.machines.context import Identity, LedgerContext, Parts
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import ALL_FEATURES, version_bit
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import SHM, TCP

PEER = PeerId(WorkerId("p"), Incarnation(5))
MOVES = [Move(0, 0, 0, array("q", (0, 0, 8))), Move(1, 0, 0, array("q", (8, 0, 8)))]


def desk() -> LedgerContext:
    identity = Identity(PEER, "host", {"model": "m"}, Shape().layout(), (SHM, TCP), (b"key",))
    return LedgerContext(identity, Settings(), lambda blocks: [0] * len(blocks))


def test_a_card_says_what_a_node_needs_and_can_do() -> None:
    card = desk().identity.card()
    assert (card.required, card.optional, card.host) == (0, int(ALL_FEATURES) | version_bit(2), "host")
    assert (card.compat, card.transports) == ({"model": "m"}, ("shm", "tcp"))


def test_capabilities_are_found_by_name() -> None:
    identity = desk().identity
    assert identity.capabilities("tcp") is TCP
    assert identity.capabilities("rdma") is None


def test_every_move_becomes_a_copy_of_its_own_with_the_peer_s_rank() -> None:
    shared, parts = desk(), Parts(None)
    shared.start(parts, "tcp", PEER, Direction.READ, 0, MOVES)
    started = [effect for effect in shared.effects if isinstance(effect, StartCopy)]
    assert [effect.copy.job for effect in started] == [1, 2] == list(parts.moving)
    assert [effect.copy.peer.worker for effect in started] == ["p#0", "p#1"]
    assert all(shared.owners[JobId(job)] is parts for job in (1, 2))


def test_job_ids_never_repeat() -> None:
    shared = desk()
    for _ in range(3):
        shared.start(Parts(None), "tcp", PEER, Direction.READ, 0, MOVES)
    assert list(shared.owners) == [1, 2, 3, 4, 5, 6]


def test_only_what_still_moves_is_cancelled() -> None:
    shared, parts = desk(), Parts(None)
    shared.start(parts, "tcp", PEER, Direction.READ, 1, MOVES)
    parts.ended(CopyEnded(JobId(1)))
    shared.effects.clear()
    shared.cancel(parts)
    assert shared.effects == [CancelCopy(1, "tcp", JobId(2))]


def test_parts_are_at_rest_when_none_moves_and_none_may_still_land() -> None:
    shared, parts = desk(), Parts(None)
    assert parts.at_rest
    shared.start(parts, "tcp", PEER, Direction.READ, 0, MOVES)
    parts.ended(CopyEnded(JobId(1)))
    assert not parts.at_rest
    parts.ended(CopyEnded(JobId(2), at_rest=False))
    assert not parts.at_rest
    parts.rested(JobId(2))
    assert parts.at_rest
