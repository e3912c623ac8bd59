"""The router's dashboard, under `/dashboard`, rendered by `observe/dashboard`.

Law: nothing here changes anything, and no path leads to a file: its files were read at the start.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from kvbaton import __version__
from kvbaton.api.http.http_types import Answer, Handler, Request
from kvbaton.observe.dashboard.pulse import CHUNKS, RETRIES, Figures, ListedWorker, Scene, Trouble
from kvbaton.observe.dashboard.state import STATE, Page, fixed_pages, json_page
from kvbaton.observe.dashboard.watch import ClusterWatch
from kvbaton.router.app import Board
from kvbaton.router.router_settings import Fallback
from kvbaton.router.workers.directory import WorkerListState


def dashboard(board: Board, drain: str = "") -> Mapping[str, Handler]:
    """Path to handler, for `router_app(pages=...)`. `drain`: the command that drains a worker, but for its name."""

    def listed() -> Sequence[ListedWorker]:
        return [
            ListedWorker(
                str(shown["name"]),
                str(shown["role"]),
                "ready" if shown["state"] == WorkerListState.SERVING else str(shown["state"]),
                str(shown["incarnation"]),
                str(shown.get("unpaired", "")),
                urlsplit(str(shown["url"])).netloc,
            )
            for shown in board.workers()
        ]

    def figures() -> Figures:
        numbers = board.stats()
        return Figures(
            int(numbers["in_flight"]),
            int(numbers["waiting"]),
            bool(numbers.get("draining")),
            {
                CHUNKS: int(numbers["token_chunks_total"]),
                RETRIES: sum(numbers["retries_total"].values()),
                **numbers["responses_total"],
            },
        )

    mode = str(board.settings.mode)
    about = Scene(at=0.0, version=__version__, host=socket.gethostname(), mode=mode, drain=drain)
    watch = ClusterWatch(board.gathering, listed, figures, about=about)

    async def state(request: Request) -> Answer:
        told = await board.health(request)
        assert isinstance(told, Answer), "health is no stream"
        return _answer(json_page(watch.state(trouble_of(told.body, board.settings.fallback))))

    found: dict[str, Handler] = {path: _always(_answer(page)) for path, page in fixed_pages().items()}
    return {**found, STATE: state}


class _Health(msgspec.Struct):
    """What the page reads of `/health`."""

    status: str
    reason: str = ""
    workers: Mapping[str, Mapping[str, int]] = {}  # how many, by role and state

    @property
    def has_decoder(self) -> bool:
        """Whether somebody is there who could answer alone, if it may."""
        may = (WorkerListState.SERVING, WorkerListState.SUSPECT)
        return any(self.workers.get(role, {}).get(state) for role in ("decode", "both") for state in may)


def trouble_of(health: bytes, fallback: Fallback) -> Trouble | None:
    """What clients meet with, in words; None where all is well."""
    found = msgspec.json.decode(health, type=_Health)
    why = f": {found.reason}" if found.reason else ""
    match found.status:
        case "ok":
            return None
        case "degraded":
            return Trouble(f"Degraded{why}", is_down=False)
        case "draining":
            return Trouble("This router drains: new requests are answered 503", is_down=True)
    strict = " (--fallback strict)" if fallback is Fallback.STRICT and found.has_decoder else ""
    return Trouble(f"Requests are answered 503{strict}{why}", is_down=True)


def _always(answer: Answer) -> Handler:
    async def same(_: Request) -> Answer:
        return answer

    return same


def _answer(page: Page) -> Answer:
    return Answer(page.body, headers=page.headers, content_type=page.content_type)
