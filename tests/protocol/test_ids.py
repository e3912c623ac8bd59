"""Names: what is not one is refused at the door (promise 5), and ranks of a peer are told apart."""

from __future__ import annotations

import pytest

from kvbaton.protocol.ids import (
    PROMPTS_PER_TRANSFER_MAX,
    Incarnation,
    PeerId,
    TransferId,
    WorkerId,
    handoff_id,
    is_handoff_id,
    is_worker_id,
    owner_of,
    rank_peer,
)

TRANSFER = TransferId("0123456789abcdef" * 2)


def test_each_prompt_of_a_request_has_its_own_handoff() -> None:
    """Rule 4: (transfer id, prompt index)."""
    assert handoff_id(TRANSFER) == f"{TRANSFER}.0"
    assert handoff_id(TRANSFER, PROMPTS_PER_TRANSFER_MAX - 1) == f"{TRANSFER}.4095"


@pytest.mark.parametrize("index", [-1, PROMPTS_PER_TRANSFER_MAX])
def test_a_prompt_index_out_of_bounds_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"prompt index {index}"):
        handoff_id(TRANSFER, index)


def test_what_handoff_id_makes_is_a_handoff_id() -> None:
    assert all(is_handoff_id(handoff_id(TRANSFER, index)) for index in (0, 1, 4095))


@pytest.mark.parametrize(
    "text", ["", "abc.0", TRANSFER, f"{TRANSFER}.", f"{TRANSFER}.01", f"{TRANSFER}.4096", f"{TRANSFER.upper()}.0"]
)
def test_other_text_is_no_handoff_id(text: str) -> None:
    assert not is_handoff_id(text)


@pytest.mark.parametrize("text", ["p", "prefill-0.eu_1", "P" * 64])
def test_plain_names_are_worker_ids(text: str) -> None:
    assert is_worker_id(text)


@pytest.mark.parametrize("text", ["", "-p", ".p", "p q", "p\n", "p#0", "ü", "P" * 65])
def test_other_text_is_no_worker_id(text: str) -> None:
    assert not is_worker_id(text)


def test_a_rank_of_a_peer_cannot_be_taken_for_a_worker() -> None:
    peer = PeerId(WorkerId("p"), Incarnation(10))
    assert rank_peer(peer, 3) == PeerId(WorkerId("p#3"), Incarnation(10))
    assert not is_worker_id(rank_peer(peer, 3).worker)


def test_a_peer_prints_with_its_life() -> None:
    assert str(PeerId(WorkerId("p"), Incarnation(10))) == "p@000000000000000a"


def test_a_rank_leads_to_the_peer_that_it_is_one_of() -> None:
    peer = PeerId(WorkerId("p-1"), Incarnation(3))
    assert [owner_of(rank_peer(peer, rank)) for rank in (0, 12)] == [peer, peer]
