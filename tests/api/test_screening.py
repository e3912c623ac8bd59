"""What a request with a body must be: one table, read by the router and by workers."""

from __future__ import annotations

import pytest

from kvbaton.api import screening
from kvbaton.api.api_errors import ApiError


def refused(headers: dict[str, list[str]], origins: tuple[str, ...] = ()) -> str | None:
    try:
        screening.check(lambda name: headers.get(name, []), origins)
    except ApiError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://a:80", "a", True), ("http://a", "a:80", True), ("https://a", "a:443", True), ("https://a", "a", True),
        ("http://[::1]:8000", "[::1]:8000", True), ("http://a:8000", "a:8000", True), ("http://A", "a", True),
        ("http://a:8000", "a:8001", False), ("http://a", "b", False), ("https://a:80", "a", False), ("a", "a", False),
        ("ws://a", "a", False), ("http://", "", False), ("null", "null", False), ("http://a.b", "a", False),
    ],
)  # fmt: skip
def test_an_origin_is_compared_with_the_host_that_was_asked(origin: str, host: str, same: bool) -> None:
    assert refused({"origin": [origin], "host": [host]}) == (None if same else "foreign_origin")


def test_one_foreign_word_among_several_is_foreign() -> None:
    assert refused({"origin": ["http://a", "http://b"], "host": ["a"]}) == "foreign_origin"
    assert refused({"origin": ["http://a"], "host": ["a", "b"]}) == "foreign_origin", "which was asked?"
    assert refused({"origin": ["http://b", "http://c"], "host": ["a"]}, ("http://b",)) == "foreign_origin"
    assert refused({"origin": ["http://b"], "host": ["a"]}, ("http://b",)) is None
    assert refused({"sec-fetch-site": ["none"]}) is None
    assert refused({"sec-fetch-site": ["cross-site"]}, ("http://b",)) == "foreign_origin"
    assert refused({}) is None


@pytest.mark.parametrize("coding", ["chunked", "", " Chunked "])
def test_chunks_are_taken_and_no_other_transfer_encoding(coding: str) -> None:
    assert refused({"transfer-encoding": [coding]}) is None
    assert refused({"transfer-encoding": [coding, "gzip"]}) == "encoded_body"


@pytest.mark.parametrize(
    "codings",
    [["br"], ["zstd"], ["gzip, gzip"], ["GZIP"], ["x-gzip"], ["identity", "gzip"], ["identity, deflate"], ["x"]],
)
def test_any_encoding_of_a_body_is_refused(codings: list[str]) -> None:
    assert refused({"content-encoding": codings}) == "encoded_body"
    assert refused({"content-encoding": ["identity"]}) is None
