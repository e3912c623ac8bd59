"""What of a registered worker's standing the router chooses by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvbaton.api.params import Mode
from kvbaton.control.registry import Registration, RosterEntry, WorkerState
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router import policy
from kvbaton.router.workers.directories import RegistryDirectory
from kvbaton.router.workers.directory import ListedEngine, WorkerListState


class Registry:
    def __init__(self, entry: RosterEntry) -> None:
        self._entries = (entry,)
        self.discarded: list[tuple[str, int, tuple[str, ...]]] = []

    def workers(self) -> tuple[RosterEntry, ...]:
        return self._entries

    def discard(self, worker: WorkerId, incarnation: Incarnation, tickets: Sequence[str]) -> int:
        self.discarded.append((worker, incarnation, tuple(tickets)))
        return len(tickets)


def registry(state: WorkerState = WorkerState.READY, draining: bool = False) -> Registry:
    told = Registration(
        WorkerId("p0"), Incarnation(5), "prefill", "127.0.0.1:80", "tcp://127.0.0.1:1", host="boot id", tp_size=4
    )
    return Registry(RosterEntry(told, "key", state, draining))


def seen(state: WorkerState = WorkerState.READY, draining: bool = False) -> ListedEngine:
    (worker,) = RegistryDirectory(registry(state, draining)).snapshot()
    return worker


@pytest.mark.parametrize("state", WorkerState)
def test_a_draining_worker_is_never_asked_silent_or_not(state: WorkerState) -> None:
    assert seen(state, draining=True).state is WorkerListState.DRAINING


@pytest.mark.parametrize("state", WorkerState)
def test_a_worker_without_http_is_listed_and_never_asked(state: WorkerState) -> None:
    inside = registry(state)
    (entry,) = inside.workers()
    told = msgspec.structs.replace(entry.registration, http_address="")
    (worker,) = RegistryDirectory(Registry(msgspec.structs.replace(entry, registration=told))).snapshot()
    assert (worker.url, worker.state) == ("", WorkerListState.NO_HTTP)
    other = ListedEngine(WorkerId("d0"), "decode", "http://d0:1")
    both = msgspec.structs.replace(worker, role="both")
    assert policy.pairs([worker, other], Mode.PULL) == [] and policy.alone([both], 0) is None
    assert "no prefill worker has an HTTP address" in policy.explain([worker, other], Mode.PULL)


def test_its_host_and_size_are_known() -> None:
    assert (seen().host, seen().tp_size, seen().state) == ("boot id", 4, WorkerListState.SERVING)


def test_a_ticket_that_is_given_up_goes_to_the_life_that_gave_it() -> None:
    listed = registry()
    directory = RegistryDirectory(listed)
    (worker,) = directory.snapshot()
    directory.discard(worker, "ticket")
    assert listed.discarded == [("p0", 5, ("ticket",))]


def test_a_worker_of_sglang_is_told_in_its_own_words_and_paired_with_its_like() -> None:
    """P's bootstrap is one port before its control socket; nobody is asked for a prompt alone."""
    inside = registry()
    (entry,) = inside.workers()
    told = msgspec.structs.replace(
        entry.registration, modes=("sglang",), control_endpoint="tcp://[fd00::1]:8999", continues="output"
    )
    (worker,) = RegistryDirectory(Registry(msgspec.structs.replace(entry, registration=told))).snapshot()
    assert (worker.dialect, worker.address, worker.modes) == ("sglang", "[fd00::1]:8998", (Mode.STREAM,))
    assert not worker.computes_alone and not worker.is_own and worker.continues == ""
    vllm = ListedEngine(WorkerId("d0"), "decode", "http://d0:1")
    like = msgspec.structs.replace(vllm, name=WorkerId("d1"), dialect="sglang", modes=(Mode.STREAM,))
    assert [pair.decode.name for pair in policy.pairs([worker, vllm, like], Mode.STREAM)] == ["d1"]
