"""Which of the tickets that come back mean something here."""

from __future__ import annotations

import pytest

from kvbaton.node.cluster_node import discarded
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.protocol.events import Discarded
from kvbaton.protocol.ids import HandoffId, Incarnation, PeerId, TransferId, WorkerId
from kvbaton.protocol.wire.ticket import Ticket, seal

KEY, NOW_S = b"key of the cluster", 1000.0
ME = PeerId(WorkerId("p"), Incarnation(7))
HANDOFF = HandoffId("0" * 32 + ".0")


@pytest.fixture
def doorway() -> Doorway:
    config = DoorwayConfig(
        me=ME, ranks=1, groups=1, ticket_keys=(KEY,), ticket_ttl_s=60.0,
        mint=lambda: TransferId("1" * 32), wall=lambda: NOW_S,
    )  # fmt: skip
    return Doorway(config, EpochTable(16))


def ticket(source: str = "p", life: int = 7, expires_s: float = NOW_S + 1, key: bytes = KEY) -> str:
    return seal(Ticket(HANDOFF, WorkerId(source), expires_s, Incarnation(life)), key)


def test_a_ticket_of_its_own_and_one_that_the_router_minted_count(doorway: Doorway) -> None:
    granted, _ = doorway.grant(b"digest", 3, ((1,),))
    found = list(discarded(doorway, [granted, ticket(life=0)]))
    assert found == [Discarded(HandoffId("1" * 32 + ".0")), Discarded(HANDOFF)]


@pytest.mark.parametrize(
    "other",
    [ticket(key=b"another"), ticket("d"), ticket(life=6), ticket(expires_s=NOW_S - 1), "nonsense", "", "x" * 5000],
    ids=["forged", "another worker's", "another life's", "expired", "nonsense", "empty", "long"],
)
def test_others_mean_nothing_and_do_not_stand_in_the_way(doorway: Doorway, other: str) -> None:
    assert list(discarded(doorway, [other, ticket()])) == [Discarded(HANDOFF)]
