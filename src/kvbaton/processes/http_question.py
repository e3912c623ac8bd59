"""One HTTP request to a cluster.

Law: the whole request, from name resolution to the last byte, takes no longer than its timeout, also if the other side
sends a byte now and then; no more is read than allowed. No proxy is used: the requests stay on this machine. Error
texts are safe to show on a terminal, and the body of an error response is read within the same timeout. A key goes to
the place that it is for and nowhere else, also not where that sends the question on to.
"""

from __future__ import annotations

import http.client
import io
import ssl
import threading
import urllib.error
import urllib.request
from email.message import Message

import msgspec

from kvbaton.observe.flight.dumps import printable

SAID_CHARS_MAX = 200
"""Of the characters in the other side's first line."""


class HttpAnswer(msgspec.Struct, frozen=True):
    body: bytes
    headers: Message


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster is asked."""

    cacert: str = ""  # a file of certificates that are believed, in the place of the system's
    key: str = ""
    key_for: str = ""  # the URL below which the key is shown

    def __repr__(self) -> str:
        return "Way(…)"

    def request(self, url: str) -> urllib.request.Request:
        found = urllib.request.Request(url)
        if self.key and url.startswith(f"{self.key_for}/"):
            found.add_unredirected_header("Authorization", f"Bearer {self.key}")
        return found


PLAIN = Way()


def asked(url: str, timeout_s: float, bytes_max: int, way: Way = PLAIN) -> HttpAnswer:
    """The response; OSError, ValueError or HTTPException as urllib raises them, TimeoutError when the time is up."""
    found: list[HttpAnswer | Exception] = []

    def ask() -> None:
        try:
            found.append(_ask(url, timeout_s, bytes_max, way))
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


def _ask(url: str, timeout_s: float, bytes_max: int, way: Way) -> HttpAnswer:
    trusting = ssl.create_default_context(cafile=way.cacert) if way.cacert else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))
    try:
        with opener.open(way.request(url), timeout=timeout_s) as answer:
            return HttpAnswer(answer.read(bytes_max), answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            body = io.BytesIO(error.read(bytes_max))
        raise urllib.error.HTTPError(url, error.code, _shown(error.reason), error.headers, body) from None


def why(error: Exception) -> str:
    """Why there was no response, with what to do where that is known."""
    found = getattr(error, "reason", error)
    more = "; name its authority with --cacert FILE" if isinstance(found, ssl.SSLCertVerificationError) else ""
    return f"{found}{more}"


def _shown(said: str) -> str:
    return printable(said)[:SAID_CHARS_MAX]
