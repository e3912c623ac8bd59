"""Pairing refuses by the name of what differs (promise 1, and 5): features, compatibility key, layout, data planes."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.pairing_state import check_card, pair_as_source, pair_as_target
from kvbaton.protocol.wire.messages import Card, Feature
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import RDMA, SHM, TCP

ME = PeerId(WorkerId("p"), Incarnation(1))


def identity(**changes: object) -> Identity:
    given: dict[str, object] = {
        "me": ME,
        "host": "here",
        "compat": {"model": "m", "dtype": "u32", "info.version": "1"},
        "layout": Shape().layout(),
        "transports": (SHM, TCP),
        "ticket_keys": (b"key",),
    }
    return Identity(**(given | changes))  # type: ignore[arg-type]


def card(**changes: object) -> Card:
    return msgspec.structs.replace(identity().card(), **changes)


def refused(mine: Identity, theirs: Card) -> tuple[Reason, str]:
    with pytest.raises(ProtocolError) as error:
        pair_as_source(mine, theirs)
    with pytest.raises(ProtocolError) as other:
        pair_as_target(mine, theirs, "tcp")
    assert error.value.reason is other.value.reason
    return error.value.reason, error.value.detail


def test_equals_pair() -> None:
    check_card(identity(), card())
    assert pair_as_source(identity(), card())[1] is SHM
    assert pair_as_target(identity(), card(), "tcp")[1] is TCP


def test_a_feature_that_the_peer_requires_and_we_lack_is_named() -> None:
    reason, detail = refused(identity(optional=int(Feature.PULL)), card(required=int(Feature.PUSH) | 1 << 40))
    assert (reason, detail) == (Reason.WRONG_VERSION, "features: the peer requires push, bit 40")


def test_a_feature_that_we_require_and_the_peer_lacks_is_named() -> None:
    reason, detail = refused(identity(required=int(Feature.STREAM)), card(optional=int(Feature.PULL)))
    assert (reason, detail) == (Reason.WRONG_VERSION, "features: the peer lacks stream")


def test_features_that_neither_requires_may_differ() -> None:
    """Mixed versions interoperate."""
    check_card(identity(optional=int(Feature.PULL)), card(optional=1 << 40 | int(Feature.PULL)))


@pytest.mark.parametrize(
    ("compat", "detail"),
    [
        ({"model": "n", "dtype": "u32"}, "compat.model: ours is 'm', theirs is 'n'"),
        ({"model": "m"}, "compat.dtype: ours is 'u32', theirs is not stated"),
        ({"model": "m", "dtype": "u32", "rope": "x"}, "compat.rope: ours is not stated, theirs is 'x'"),
    ],
)
def test_a_differing_fact_is_named_with_both_values(compat: dict[str, str], detail: str) -> None:
    assert refused(identity(), card(compat=compat)) == (Reason.INCOMPATIBLE, detail)


def test_what_is_only_information_may_differ() -> None:
    check_card(identity(), card(compat={"model": "m", "dtype": "u32", "info.version": "2"}))


def test_a_malformed_compatibility_key_is_a_bad_message() -> None:
    assert refused(identity(), card(compat={"": "x"}))[0] is Reason.BAD_MESSAGE


def test_layouts_that_cannot_be_mapped_are_refused() -> None:
    assert refused(identity(), card(layout=Shape(group_layers=(3,)).layout()))[0] is Reason.INCOMPATIBLE


def test_a_layout_that_leaves_its_memory_is_a_bad_message() -> None:
    layout = Shape().layout()
    rank = msgspec.structs.replace(layout.ranks[0], region_bytes=(8,))
    assert refused(identity(), card(layout=msgspec.structs.replace(layout, ranks=(rank,))))[0] is Reason.BAD_MESSAGE


def test_more_pairs_of_ranks_than_one_message_can_carry_are_refused() -> None:
    wide = Shape(ranks=128, heads=1, blocks=4)
    with pytest.raises(ProtocolError) as error:
        pair_as_source(identity(layout=wide.layout()), card(layout=wide.layout()))
    assert error.value.reason is Reason.INCOMPATIBLE
    assert error.value.detail == "ranks: 128 here, 128 there; at most 4096 pairs"


def test_the_best_of_p_s_data_planes_that_d_has_is_chosen() -> None:
    assert pair_as_source(identity(transports=(RDMA, TCP)), card())[1] is TCP


def test_a_data_plane_of_one_host_is_not_chosen_between_two() -> None:
    assert pair_as_source(identity(), card(host="there"))[1] is TCP


def test_no_data_plane_in_common_is_refused_with_both_lists() -> None:
    with pytest.raises(ProtocolError) as error:
        pair_as_source(identity(), card(transports=("rdma", "shm"), host="there"))
    assert error.value.reason is Reason.NO_TRANSPORT
    assert error.value.detail == "transports: ours are shm, tcp; theirs are rdma, shm"


def test_a_data_plane_that_d_has_not_cannot_be_chosen_for_it() -> None:
    with pytest.raises(ProtocolError, match=r"no_transport: transport: the peer chose 'rdma', which this node lacks"):
        pair_as_target(identity(), card(), "rdma")
