"""The log of a process: lines on stderr, as text or as JSON, each with its level and the request that it is about.

Laws: writing a line never waits: where stderr takes no more (a pipe that is not read), lines are dropped, counted, and
the count is logged once there is room. One record is one line, whatever its message holds; only a traceback in text has
more. A line written while a request is served carries that request's id.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO, get_args

import msgspec

log = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
AccessLines = Literal["on", "errors", "off"]

LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
ACCESS_LINES: tuple[AccessLines, ...] = get_args(AccessLines)
LEVEL_VARIABLE = "KVBATON_LOG_LEVEL"
FORMAT_VARIABLE = "KVBATON_LOG_FORMAT"
ACCESS_VARIABLE = "KVBATON_ACCESS_LOG"
ACCESS_LOGGER = "kvbaton.access"
REQUEST_CHARS_MAX = 128
"""Of a request's id, in text; clients may choose ids of a thousand characters."""
_MESSAGE_CHARS_MAX = 8000
_PIPE_BYTES = 4096
"""What a pipe takes without waiting where it is writable at all (PIPE_BUF)."""
_CODE = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)*)\] ")

Fields = Mapping[str, Any]
NO_FIELDS: Fields = {}

request_of_task: ContextVar[str] = ContextVar("kvbaton_request", default="")
"""The id of the request that this task, and those it starts, work for."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a process logs. The environment carries it to the processes that this one starts."""

    level: LogLevel = "warning"
    format: LogFormat = "text"
    access: AccessLines = "on"

    @property
    def environment(self) -> dict[str, str]:
        return {LEVEL_VARIABLE: self.level, FORMAT_VARIABLE: self.format, ACCESS_VARIABLE: self.access}


_CURRENT = [LogSettings()]  # of this process


def current() -> LogSettings:
    return _CURRENT[0]


def from_environment(environ: Mapping[str, str], default: LogSettings | None = None) -> LogSettings:
    """What the environment says, else the default; `ValueError` names the variable."""
    default = default or LogSettings()
    found = {
        "level": environ.get(LEVEL_VARIABLE, "").lower() or default.level,
        "format": environ.get(FORMAT_VARIABLE, "").lower() or default.format,
        "access": environ.get(ACCESS_VARIABLE, "").lower() or default.access,
    }
    for name, variable, choices in (
        ("level", LEVEL_VARIABLE, LEVELS),
        ("format", FORMAT_VARIABLE, FORMATS),
        ("access", ACCESS_VARIABLE, ACCESS_LINES),
    ):
        if found[name] not in choices:
            raise ValueError(f"{variable}: got {found[name][:40]!r}, expected one of {', '.join(choices)}")
    return msgspec.convert(found, LogSettings)


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Log so from now on. Libraries are heard from warnings on, and from everything on where we debug."""
    _CURRENT[0] = settings
    handler = LineHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines())
    root = logging.getLogger()
    for each in [each for each in root.handlers if isinstance(each, LineHandler)]:
        root.removeHandler(each)
    root.addHandler(handler)
    root.setLevel(settings.level.upper())
    if settings.level != "debug":
        handler.addFilter(_ours_or_grave)
    logging.getLogger(ACCESS_LOGGER).disabled = settings.access == "off"


def _ours_or_grave(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] == "kvbaton"


@contextlib.contextmanager
def serving_request(request: str) -> Iterator[None]:
    """Lines of this task are about that request."""
    token = request_of_task.set(request)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # closed by another task than opened it: its context ends anyway
            request_of_task.reset(token)


class LineHandler(logging.Handler):
    """Writes lines to a stream whose reader may be slow or gone."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._file = _number(stream)
        self._ready = select.poll()
        if self._file is not None:
            self._ready.register(self._file, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - a line that cannot be made costs no more than the line
            self.dropped += 1
        else:
            self.put(line)

    def put(self, line: str) -> None:
        """One line, or none of it."""
        with self.lock or contextlib.nullcontext():
            try:
                if self.dropped and self._is_ready():
                    lost, self.dropped = self.dropped, 0
                    log.warning(
                        "[log-lines-lost] %d lines were dropped: stderr was not read in time", lost
                    )  # comes here
                if not self._write(line + "\n"):
                    self.dropped += 1
            except Exception:  # noqa: BLE001 - the same of one that cannot be written
                self.dropped += 1

    def _write(self, text: str) -> bool:
        """Whether all of it was taken; of a long one, a beginning may have been."""
        if self._file is None:
            self._stream.write(text)
            self._stream.flush()
            return True
        data = text.encode("utf-8", "backslashreplace")
        for begin in range(0, len(data), _PIPE_BYTES):
            if not self._is_ready():
                return False
            os.write(self._file, data[begin : begin + _PIPE_BYTES])
        return True

    def _is_ready(self) -> bool:
        return self._file is None or any(event & (select.POLLOUT | select.POLLERR) for _, event in self._ready.poll(0))


def _number(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class TextLines(logging.Formatter):
    """`2026-11-17 16:00:00,123 INFO kvbaton.router.app: message request=ID`."""

    def format(self, record: logging.LogRecord) -> str:
        line = self.line(record.created, record.levelname, record.name, record.getMessage(), _request(record))
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line

    def line(self, at: float, level: str, name: str, said: str, request: str, more: Fields = NO_FIELDS) -> str:
        said, request = one_line(said), request[:REQUEST_CHARS_MAX]
        about = f" request={request}" if request and request not in said else ""
        return f"{_local_second(int(at))},{int(at % 1 * 1000):03d} {level} {name}: {said}{about}"


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; code, request, fields, traceback where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        more = {**getattr(record, "fields", NO_FIELDS), "pid": record.process, "thread": record.threadName}
        if trace := _trace(self, record):
            more["traceback"] = trace
        return self.line(record.created, record.levelname, record.name, record.getMessage(), _request(record), more)

    def line(self, at: float, level: str, name: str, said: str, request: str, more: Fields = NO_FIELDS) -> str:
        said = said[:_MESSAGE_CHARS_MAX]
        stamp = f"{_utc_second(int(at))}.{int(at % 1 * 1000):03d}Z"
        facts: dict[str, Any] = {"time": stamp, "level": level, "logger": name, "message": said}
        if said.startswith("[") and (code := _CODE.match(said)) is not None:
            facts["code"] = code[1]
        if request:
            facts["request"] = request
        return msgspec.json.encode({**facts, **more} if more else facts).decode()


def say_quickly(level: str, name: str, said: str, request: str, fields: Fields) -> bool:
    """Log a line without a record's cost, which is three times the line's own; False where this module does not log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler) and isinstance(handler.formatter, TextLines | JsonLines):
            handler.put(handler.formatter.line(time.time(), level, name, said, request, fields))
            return True
    return False


@functools.lru_cache(4)
def _local_second(at: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


@functools.lru_cache(4)
def _utc_second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def one_line(text: str) -> str:
    """The text without line breaks and other controls, so that no peer or client forges a line or moves a cursor."""
    text = text[:_MESSAGE_CHARS_MAX]
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _request(record: logging.LogRecord) -> str:
    return str(getattr(record, "request", "")) or request_of_task.get()


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    return record.exc_text or ""
