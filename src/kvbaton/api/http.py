"""The aiohttp side of an OpenAI-compatible server: errors as JSON, streams that end explicitly, a port to listen on.

Laws: a client that goes away cancels its handler (aiohttp does so only when told): nothing is computed for nobody. No
body is inflated, and nothing that a client sent is in the log but its path and its id of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from kvbaton.api import access_log, screening, sse
from kvbaton.api.api_errors import ApiError, internal, too_large
from kvbaton.api.crowding import Crowd, connections_max, counted
from kvbaton.api.http_common import BACKLOG, KEEPALIVE_S, REQUEST_ID, SHUTDOWN_S, port_error
from kvbaton.api.mishearing import CLIENTS_FAULT, Misheard
from kvbaton.api.request_ids import checked_request_id
from kvbaton.processes.process_logs import serving_request

log = logging.getLogger(__name__)

BODY_S = 60.0
"""From the headers of a request to the last byte of its body, at a worker."""
UNREAD_S = 600.0
"""A client that takes nothing of its stream for this long is cut off, where the stream has no deadline. Longer than a
router's deadline: until then it is the router's client that does not read, and no fault of anybody's."""
LINGER_S = 2.0
"""For which a refused client may go on sending what nobody reads: time to read why."""

_encode = msgspec.json.Encoder().encode
_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = _encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> web.Response:
    return json_response(error.body, error.status, error.headers)


@web.middleware
async def _logged(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """An access log, and the request's id on every line of its task."""
    begun, name, status = time.monotonic(), request_id(request), access_log.CLIENT_GONE  # uvloop's clock stands still
    with serving_request(name):
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            took_s = time.monotonic() - begun
            access_log.answered(request.method, request.path, status, took_s, request=name, client=request.remote or "")


@web.middleware
async def errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Whatever goes wrong before the first byte becomes OpenAI's error object."""
    try:
        screening.check_host(request.headers.getall("Host", ()), is_new=request.version >= HttpVersion11)
        return await handler(request)
    except ApiError as error:
        fault = error
    except web.HTTPRequestEntityTooLarge:
        fault = too_large(request.app[BODY_BYTES_MAX])
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
        said = error.reason if code != "not_found" else f"no such path; there are {', '.join(_paths(request.app))}"
        fault = ApiError(error.status, f"{request.method} {request.path[:200]}: {said}", code=code)
    except ConnectionError:
        raise
    except CLIENTS_FAULT as error:
        _misheard(request.app).note(error)
        fault = ApiError(400, "body: does not match its headers", param="body", code="bad_request")
    except Exception:
        log.exception("[request-crashed] %s %.200s", request.method, request.path)
        fault = internal()
    return error_response(fault.told_to(request.path, request_id(request)))


def _paths(app: web.Application) -> list[str]:
    return [each.canonical for each in app.router.resources()]


BODY_BYTES_MAX: web.AppKey[int] = web.AppKey("body_bytes_max", int)
MISHEARD: web.AppKey[Misheard] = web.AppKey("misheard", Misheard)


def new_app(body_bytes_max: int) -> web.Application:
    app = web.Application(middlewares=[_logged, errors_as_json], client_max_size=body_bytes_max)
    app[BODY_BYTES_MAX] = body_bytes_max
    app[MISHEARD] = Misheard()
    app.on_response_prepare.append(_name_answer)
    return app


def _misheard(app: web.Application) -> Misheard:
    return app.get(MISHEARD) or Misheard()


def request_id(request: web.BaseRequest) -> str:
    """The same at each call: of the request's own answer, and of what is computed for it."""
    if _ID not in request:
        request[_ID] = checked_request_id(request.headers.get(REQUEST_ID, ""))
    return request[_ID]


async def _name_answer(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault(REQUEST_ID, request_id(request))


class ToldHandler(web.RequestHandler):
    """One connection. What cannot be read as a request is answered in JSON like the rest."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # counts it, and raises where an answer has begun
        fault = internal() if status >= 500 else ApiError(status, "request: not HTTP/1.1", code="bad_request")
        response = error_response(fault.told_to("", request_id(request)))
        response.headers[REQUEST_ID] = fault.request_id
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):  # aiohttp's own, before any middleware: it repeats the header
            fault = ApiError(417, "Expect: only 100-continue is understood; leave the header out", param="Expect")
            resp = error_response(fault.told_to(request.path, request_id(request)))
        return await super().finish_response(request, resp, start_time)


async def send_events(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    deadline: float | None = None,
    tell: Callable[[ApiError], bytes] = sse.error_event,
) -> web.StreamResponse:
    """Send `events` as they come. What fails before the first one is raised, what fails later is told in the stream.

    A client that has not read by the deadline is cut off.
    """
    async with contextlib.aclosing(events):
        first = await anext(events, b"")
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
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
        await _write(response, tell(error.told_to("", request_id(request))), deadline)
    except Exception:
        log.exception("[stream-crashed] %s %s: in mid-stream", request.method, request.path)
        await _write(response, tell(internal().told_to("", request_id(request))), deadline)


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
    how: dict[str, Any] = {
        "access_log": None,
        "keepalive_timeout": KEEPALIVE_S,
        "logger": _misheard(app),
        "auto_decompress": False,  # it would inflate before anybody has looked who asks
        "lingering_time": LINGER_S,
    }
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, **how)
    await runner.setup()
    assert runner.server is not None
    loop = asyncio.get_running_loop()
    handler = functools.partial(ToldHandler, runner.server, loop=loop, **how)
    connection = functools.partial(crowd.connection, runner.server, handler)
    try:
        try:
            listener = await loop.create_server(connection, host, port, backlog=BACKLOG)
        except OSError as error:
            raise port_error(host, port, error) from None
        try:
            yield f"http://{_bound_address(listener)}"
        finally:
            listener.close()
    finally:
        await runner.cleanup()


def _bound_address(listener: asyncio.Server) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
