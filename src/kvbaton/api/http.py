"""The aiohttp side of an OpenAI-compatible server: errors as JSON, streams that end explicitly, a port to listen on.

Laws: a client that goes away cancels its handler (aiohttp does so only when told): nothing is computed for nobody. No
body is inflated, and nothing that a client sent is in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
import uvloop
from aiohttp import web

from kvbaton.api import screening, sse
from kvbaton.api.api_errors import ApiError, PortInUseError, internal, too_large
from kvbaton.api.crowding import Crowd, connections_max, counted
from kvbaton.api.mishearing import CLIENTS_FAULT, Misheard
from kvbaton.api.request_ids import REQUEST_ID_CHARS_MAX

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0
"""Longer than any client of ours keeps an idle connection (15 s), so that no request meets a closing one."""
SHUTDOWN_S = 2.0
BODY_S = 60.0
"""From the headers of a request to the last byte of its body, at a worker."""
UNREAD_S = 600.0
"""A client that takes nothing of its stream for this long is cut off, where the stream has no deadline. Longer than a
router's deadline: until then it is the router's client that does not read, and no fault of anybody's."""
LINGER_S = 2.0
"""For which a refused client may go on sending what nobody reads: time to read why."""
BACKLOG = 1024
REQUEST_ID = "X-Request-Id"

_REQUEST_ID_FORM = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARS_MAX}}}")
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a server's main on uvloop, which does the same with less."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = _encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    return json_response(error.body, error.status, error.headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Whatever goes wrong before the first byte becomes OpenAI's error object."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge:
        return error_response(too_large(request.app[BODY_BYTES_MAX]))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
        return error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}", code=code))
    except ConnectionError:
        raise
    except CLIENTS_FAULT as error:
        _misheard(request.app).note(error)
        return error_response(ApiError(400, "body: not what its headers said", param="body", code="bad_request"))
    except Exception:
        log.exception("[request-crashed] %s %.200s", request.method, request.path)
        return error_response(internal())


BODY_BYTES_MAX: web.AppKey[int] = web.AppKey("body_bytes_max", int)
MISHEARD: web.AppKey[Misheard] = web.AppKey("misheard", Misheard)


def new_app(body_bytes_max: int) -> web.Application:
    app = web.Application(middlewares=[errors_as_json], client_max_size=body_bytes_max)
    app[BODY_BYTES_MAX] = body_bytes_max
    app[MISHEARD] = Misheard()
    return app


def _misheard(app: web.Application) -> Misheard:
    return app.get(MISHEARD) or Misheard()


def request_id(request: web.Request) -> str:
    return checked_request_id(request.headers.get(REQUEST_ID, ""))


def checked_request_id(given: str) -> str:
    """The client's id for the request where it is printable and short, else a new one."""
    return given if _REQUEST_ID_FORM.fullmatch(given) else secrets.token_hex(16)


async def send_events(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    headers: Mapping[str, str],
    deadline: float | None = None,
    tell: Callable[[ApiError], bytes] = sse.error_event,
) -> web.StreamResponse:
    """Send `events` as they come. What fails before the first one is raised, what fails later is told in the stream.

    `headers` may be filled until the first event has come. A client that has not read by the deadline is cut off.
    """
    async with contextlib.aclosing(events):
        first = await anext(events, b"")
        response = web.StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
        response.content_type = sse.CONTENT_TYPE
        try:
            await response.prepare(request)
            await _write(response, first, deadline)
            await _send_rest(request, response, events, deadline, tell)
            await _within(response.write_eof(), deadline)
        except ConnectionError:  # the client is gone; there is nobody to tell
            if request.transport is not None:
                request.transport.abort()
        return response


async def _send_rest(
    request: web.Request,
    response: web.StreamResponse,
    events: AsyncGenerator[bytes, None],
    deadline: float | None,
    tell: Callable[[ApiError], bytes],
) -> None:
    try:
        async for data in events:
            await _write(response, data, deadline)
    except ConnectionError:
        raise
    except ApiError as error:
        await _write(response, tell(error), deadline)
    except Exception:
        log.exception("[stream-crashed] %s %s: in mid-stream", request.method, request.path)
        await _write(response, tell(internal()), deadline)


async def read_body(request: web.Request, seconds: float = BODY_S) -> bytes:
    """All of it, as it came and in time; `ApiError` for a client that does not send what it said it would."""
    screening.check(lambda name: request.headers.getall(name, ()))
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        said = f"body: not complete within {seconds} s"
        raise ApiError(408, said, type="timeout_error", code="body_timeout", param="body") from None


async def _write(response: web.StreamResponse, data: bytes, deadline: float | None) -> None:
    await _within(response.write(data), deadline)


async def _within(writing: Awaitable[None], deadline: float | None) -> None:
    try:
        async with asyncio.timeout(UNREAD_S) if deadline is None else asyncio.timeout_at(deadline):
            await writing
    except TimeoutError:
        raise ConnectionAbortedError("the client did not read its stream in time") from None


@contextlib.asynccontextmanager
async def serving(app: web.Application, host: str, port: int, *, crowd_max: int | None = None) -> AsyncIterator[str]:
    """Listen while the context lasts; gives the URL (port 0 takes a free one). `PortInUseError` if it is taken."""
    crowd = Crowd(connections_max() if crowd_max is None else crowd_max)
    app.middlewares.append(counted(crowd))
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
        logger=_misheard(app),
        auto_decompress=False,  # it would inflate before anybody has looked who asks
        lingering_time=LINGER_S,
    )
    await runner.setup()
    assert runner.server is not None
    connection = functools.partial(crowd.connection, runner.server)
    try:
        try:
            listener = await asyncio.get_running_loop().create_server(connection, host, port, backlog=BACKLOG)
        except OSError as error:
            raise port_error(host, port, error) from None
        try:
            yield f"http://{_bound_address(listener)}"
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def port_error(host: str, port: int, error: OSError) -> PortInUseError:
    """What an operator is told of a port that cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"port {port} on {host} is in use; choose another (0 takes a free one)")
    return PortInUseError(f"cannot listen on {host} port {port}: {error.strerror or error}")


def _bound_address(listener: asyncio.Server) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
