"""One HTTP request to a cluster.

Law: the whole of it, from the name to the last byte, takes no longer than its time-out, also where the other side sends
a byte now and then; no more is read than asked for. No proxy stands between: this machine is asked by this machine.
What an error says can be shown on a terminal, and the body of a refusal was read within the same time-out.
"""

from __future__ import annotations

import http.client
import io
import threading
import urllib.error
import urllib.request
from email.message import Message

import msgspec

from kvbaton.observe.flight.sanitize import printable

SAID_CHARS_MAX = 200
"""Of what the other side put into its first line."""


class HttpAnswer(msgspec.Struct, frozen=True):
    body: bytes
    headers: Message


def asked(url: str, timeout_s: float, bytes_max: int) -> HttpAnswer:
    """What it answers; OSError, ValueError or HTTPException as urllib raises them, TimeoutError when the time is up."""
    found: list[HttpAnswer | Exception] = []

    def ask() -> None:
        try:
            found.append(_ask(url, timeout_s, bytes_max))
        except http.client.HTTPException as error:
            found.append(http.client.HTTPException(_shown(str(error))))
        except (OSError, ValueError) as error:
            found.append(error)

    asking = threading.Thread(target=ask, name="asking", daemon=True)  # dies with the command if it never ends
    asking.start()
    asking.join(timeout_s)
    if not found:
        raise TimeoutError("timed out")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _ask(url: str, timeout_s: float, bytes_max: int) -> HttpAnswer:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return HttpAnswer(answer.read(bytes_max), answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            body = io.BytesIO(error.read(bytes_max))
        raise urllib.error.HTTPError(url, error.code, _shown(error.reason), error.headers, body) from None


def _shown(said: str) -> str:
    return printable(said)[:SAID_CHARS_MAX]
