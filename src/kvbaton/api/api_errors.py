"""Errors for clients: OpenAI's error object, with a status that says who must act.

Law: every refusal names the field or the worker at fault, the reason, and the request, by the id that the answer's
`x-request-id` has; nothing else invents an error body.
"""

from __future__ import annotations

from typing import Any

import msgspec

RETRY_AFTER_S = 1
ANTHROPIC = "/v1/messages"
"""This path and those below speak Anthropic's API."""
SHOWN_CHARS = 2000
"""Of a worker's own words."""


class ApiError(Exception):
    """One refusal, ready to be sent: as a response before the first byte, as an event after it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        recorded: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.recorded = message if recorded is None else recorded  # what may be kept of it: a worker may quote a prompt
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id = ""  # known to the server that sends it
        self._is_typed = False

    @property
    def is_clients(self) -> bool:
        """Whether the same request would be refused again: neither the cluster's load nor a handoff is to blame."""
        return 400 <= self.status < 500 and self.status not in (408, 429)

    @property
    def body(self) -> dict[str, Any]:
        fault = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        name = {"request_id": self.request_id} if self.request_id else {}
        return {"type": "error", "error": fault, **name} if self._is_typed else {"error": {**fault, **name}}

    def typed(self) -> ApiError:
        """The same as Anthropic's clients read it: OpenAI's object with a type of its own."""
        self._is_typed = True
        return self

    def told_to(self, path: str, request_id: str) -> ApiError:
        """The same for one request: named, and in the form of the API that it asked."""
        self.request_id = self.request_id or request_id
        return self.typed() if path.startswith(ANTHROPIC) else self

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**found, "WWW-Authenticate": "Bearer"} if self.status == 401 else found


class PortInUseError(Exception):
    """The operator must choose another port, or stop who has it."""


def bad_field(param: str, message: str) -> ApiError:
    """The client must change one field; the message opens with its name."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def too_large(bytes_max: int) -> ApiError:
    said = f"body: larger than {bytes_max} bytes; send less (the router's bound is --body-limit)"
    return ApiError(413, said, param="body", code="body_too_large")


def unknown_model(model: str, known: list[str]) -> ApiError:
    served = ", ".join(known)
    return ApiError(404, f"model: {model!r} is not served here, only {served}", param="model", code="model_not_found")


def full(message: str) -> ApiError:
    """Too much is under way; the same request may pass later."""
    return ApiError(429, message, type="overloaded_error", code="full", retry_after_s=RETRY_AFTER_S)


def no_room(message: str) -> ApiError:
    """No memory or no connection is left for this; the same request may pass later."""
    return ApiError(503, message, type="overloaded_error", code="no_room", retry_after_s=RETRY_AFTER_S)


def unavailable(message: str, code: str = "no_pair") -> ApiError:
    """Nobody here can serve this now."""
    return ApiError(503, message, type="service_unavailable_error", code=code, retry_after_s=RETRY_AFTER_S)


def out_of_time(message: str) -> ApiError:
    return ApiError(504, message, type="timeout_error", code="deadline")


def bare(error: BaseException) -> None:
    """Let go of what an error that was dealt with has seen: frames that hold it hold bodies too, in a cycle."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def internal(message: str = "internal error; the log of this process has the traceback") -> ApiError:
    return ApiError(500, message, type="internal_error", code="internal")


class _Fault(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = ""
    code: str | int | None = None
    param: str | None = None


class _FaultBody(msgspec.Struct, frozen=True):
    error: _Fault | str | None = None
    message: str = ""  # vLLM's older shape puts the fault at top level
    detail: msgspec.Raw = msgspec.Raw(b"")  # FastAPI's own refusals, such as of a path that is not there


def read_error(status: int, data: bytes) -> ApiError:
    """A worker's error body as a value; whatever it sent, the answer is an `ApiError` with a bounded message.

    Its words go to the client and into no record: they may be the prompt's.
    """
    try:
        body = msgspec.json.decode(data, type=_FaultBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = data[:200].decode(errors="replace")
        return ApiError(status, said, type="unknown_error", recorded=f"answered {status}")
    told = body.error if isinstance(body.error, str) else body.message
    fault = body.error if isinstance(body.error, _Fault) else _Fault(message=told or _plain(bytes(body.detail)))
    code = None if fault.code is None else str(fault.code)
    said, kind = fault.message[:SHOWN_CHARS], fault.type or "unknown_error"
    return ApiError(status, said, type=kind, code=code, param=fault.param, recorded=f"answered {status}")


def _plain(detail: bytes) -> str:
    return detail[:SHOWN_CHARS].decode(errors="replace").strip('"')
