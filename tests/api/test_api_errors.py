"""Whatever a worker says instead of an answer becomes one kind of error."""

from __future__ import annotations

import pytest

from kvbaton.api.api_errors import ApiError, read_error


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "m", "code": 5}}', "m"),
        (b'{"error": "plain"}', "plain"),
        (b'{"object": "error", "message": "old"}', "old"),
        (b"<html>", "<html>"),
        (b"\xff", "\ufffd"),
        (b'{"error": {"message": 5}}', '{"error": {"message": 5}}'),
    ],
)
def test_whatever_a_worker_says_becomes_an_error_with_a_message(data: bytes, message: str) -> None:
    error = read_error(500, data)
    assert isinstance(error, ApiError)
    assert error.message == message
