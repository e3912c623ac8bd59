"""The token by which a worker's HTTP door knows its router."""

from __future__ import annotations

import pytest

from kvbaton.api.tokens import HEADER, is_good, is_loopback, token

KEY, OTHER = b"k" * 32, b"o" * 32


def test_a_token_is_for_one_worker_and_one_key() -> None:
    shown = token(KEY, "p0")
    assert is_good(shown, [KEY], "p0") and is_good(shown, [OTHER, KEY], "p0")
    assert not is_good(shown, [KEY], "p1") and not is_good(shown, [OTHER], "p0") and not is_good(shown, [], "p0")
    assert len(shown) == 32 and KEY.hex() not in shown


@pytest.mark.parametrize("shown", ["", "x", "ü", token(KEY, "p0")[:-1], token(KEY, "p0") + "A"])
def test_anything_else_is_not_good(shown: str) -> None:
    assert not is_good(shown, [KEY], "p0")


@pytest.mark.parametrize(
    ("host", "loops"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_what_is_loopback_is_known(host: str, loops: bool) -> None:
    assert is_loopback(host) is loops


def test_the_header_is_one_that_may_stand_in_a_request() -> None:
    assert HEADER.replace("-", "").isalnum()
