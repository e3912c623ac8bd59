"""Promise 5: only who can sign can name anything of P's. Tickets forged, expired or malformed are refused by name."""

from __future__ import annotations

import base64
import math
import string

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import (
    _HISTORY,
    TICKET_CHARS_MAX,
    Ticket,
    _mac,
    check_history,
    seal,
    seal_history,
    unseal,
)

KEY, OTHER = b"a key of the cluster", b"another key"
TICKET = Ticket(
    handoff_id(TransferId("0" * 32)), WorkerId("p"), 100.0, Incarnation(7), LeaseId(3), WorkerId("d"), b"digest", 2
)


def refused(text: str, now: float = 0.0, keys: tuple[bytes, ...] = (KEY,)) -> tuple[Reason, str]:
    with pytest.raises(ProtocolError) as error:
        unseal(text, keys, now)
    return error.value.reason, error.value.detail


def signed(body: bytes) -> str:
    return base64.urlsafe_b64encode(_mac(body, KEY) + body).decode().rstrip("=")


def test_what_was_sealed_comes_out_again() -> None:
    assert unseal(seal(TICKET, KEY), (KEY,), 99.9) == TICKET


def test_another_release_reads_the_same_text() -> None:
    """Golden texts: routers, P and D are upgraded one after the other."""
    assert unseal(
        "b6ihYOdO5NHzMVEwrOZbkJIBmNkiMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAuMKFwy0BZAAAAAAAABwOhZMQGZGlnZXN0Ag",
        (KEY,), 0.0,
    ) == TICKET  # fmt: skip
    proof = "lhRrRKpNKnuVqOCweULh95IBk6Fky0BZAAAAAAAAxBA4KkZ3E3Jl352l9wcC02WI"
    check_history(proof, HISTORY, WorkerId("d"), (OTHER, KEY), 100.0)


def test_a_ticket_is_text_for_a_url() -> None:
    text = seal(TICKET, KEY)
    assert text.isascii() and set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_keys_can_be_rotated() -> None:
    """Both the old and the new key verify while the cluster changes over."""
    assert unseal(seal(TICKET, OTHER), (KEY, OTHER), 0.0) == TICKET


def test_a_ticket_of_another_cluster_is_forged() -> None:
    assert refused(seal(TICKET, OTHER))[0] is Reason.TICKET_FORGED
    assert refused(seal(TICKET, KEY), keys=())[0] is Reason.TICKET_FORGED


def test_every_changed_character_is_a_forgery() -> None:
    """Also where the bytes stay the same: bits of the last character, padding, the other alphabet of base64."""
    for size in (1, 2, 3):
        text = seal(msgspec.structs.replace(TICKET, digest=b"\xff" * size), KEY)
        letters = [*enumerate(text), *((len(text) - 1, text[-1]) for _ in range(62))]
        others = string.ascii_letters + string.digits + "-_"
        for turn, (index, letter) in enumerate(letters):
            changed = text[:index] + others[turn % 64] + text[index + 1 :]
            if others[turn % 64] != letter:
                assert refused(changed)[0] is Reason.TICKET_FORGED
        for changed in (text + "=" * (-len(text) % 4 or 4), text.replace("_", "/").replace("-", "+")):
            assert changed == text or refused(changed)[0] is Reason.TICKET_FORGED


def test_every_truncation_is_a_forgery() -> None:
    text = seal(TICKET, KEY)
    assert {refused(text[:length])[0] for length in range(len(text) - 1)} == {Reason.TICKET_FORGED}


def test_expiry_refuses_and_says_by_how_much() -> None:
    assert unseal(seal(TICKET, KEY), (KEY,), 100.0) == TICKET
    reason, detail = refused(seal(TICKET, KEY), now=102.5)
    assert (reason, detail) == (Reason.TICKET_EXPIRED, "ticket: expired 2.5 s ago; ask the prefiller again")


def test_an_oversized_ticket_is_refused_before_it_is_read() -> None:
    reason, detail = refused("A" * (TICKET_CHARS_MAX + 1))
    assert (reason, detail) == (Reason.TICKET_FORGED, "ticket: 1025 characters, at most 1024")


@pytest.mark.parametrize("text", ["not base64!", "ümlaut", "\ud800", "A"])
def test_what_is_not_base64url_is_refused(text: str) -> None:
    assert refused(text) == (Reason.TICKET_FORGED, "ticket: not base64url text")


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode((1, ("x",)))])
def test_a_signed_ticket_that_cannot_be_read_is_refused(body: bytes) -> None:
    reason, detail = refused(signed(body))
    assert reason is Reason.TICKET_FORGED and detail.startswith("ticket: signed but unreadable")


@pytest.mark.parametrize("changes", [{"max_readers": 0}, {"max_readers": 4097}, {"expires_unix_s": math.nan}])
def test_a_signed_ticket_with_a_number_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    reason, detail = refused(seal(msgspec.structs.replace(TICKET, **changes), KEY))
    assert reason is Reason.TICKET_FORGED and detail.startswith("ticket: signed but unreadable (Expected")


@pytest.mark.parametrize(
    "changes", [{"handoff": HandoffId("x")}, {"source": WorkerId("a b")}, {"source": WorkerId("")}]
)
def test_a_signed_ticket_with_malformed_ids_is_refused(changes: dict[str, object]) -> None:
    text = seal(msgspec.structs.replace(TICKET, **changes), KEY)
    assert refused(text) == (Reason.TICKET_FORGED, "ticket: signed but with malformed ids")


def test_fields_added_by_a_later_version_pass() -> None:
    fields = (*msgspec.structs.astuple(TICKET), "new", 7)
    assert unseal(signed(msgspec.msgpack.encode((1, fields))), (KEY,), 0.0) == TICKET


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(st.text(max_size=1100) | st.binary(max_size=64).map(signed))
def test_no_text_does_anything_but_raise_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        unseal(text, (KEY,), 0.0)


HISTORY = (7, 0, 151_935)


def doubted(text: str, tokens: tuple[int, ...] = HISTORY, me: str = "d", now: float = 0.0) -> tuple[Reason, str]:
    with pytest.raises(ProtocolError) as error:
        check_history(text, tokens, WorkerId(me), (OTHER, KEY), now)
    return error.value.reason, error.value.detail


def test_a_history_is_good_for_its_tokens_at_its_worker_until_its_time() -> None:
    proof = seal_history(HISTORY, WorkerId("d"), 100.0, KEY)
    check_history(proof, HISTORY, WorkerId("d"), (OTHER, KEY), 100.0)
    assert doubted(proof, (7, 0)) == doubted(proof, me="e")
    assert doubted(proof, (7, 0))[0] is Reason.TICKET_FORGED
    assert doubted(proof, now=103.5) == (
        Reason.TICKET_EXPIRED, "history: its proof expired 3.5 s ago; ask the router again",
    )  # fmt: skip


def test_no_ticket_passes_for_a_history_and_no_history_for_a_ticket() -> None:
    assert doubted(seal(TICKET, KEY))[0] is Reason.TICKET_FORGED
    assert refused(seal_history(HISTORY, WorkerId("d"), 100.0, KEY))[0] is Reason.TICKET_FORGED


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode((1, ("d", "soon", b"")))])
def test_a_signed_history_that_cannot_be_read_is_refused(body: bytes) -> None:
    text = base64.urlsafe_b64encode(_mac(body, KEY, _HISTORY) + body).decode().rstrip("=")
    assert doubted(text)[1].startswith("history: signed but unreadable")
