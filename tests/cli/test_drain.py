"""`kvbaton drain` against a registry over real sockets: its exit status is the verdict, its words say the next step."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.cli import drain as command
from kvbaton.cli import main as cli
from kvbaton.cli import restart as restart_command
from kvbaton.cli.drain import EngineStanding, look_at
from kvbaton.control import keyring
from kvbaton.control.registry import (
    DrainState,
    OperatorLine,
    Registration,
    RegistryGroup,
    RegistryServer,
    RegistrySettings,
)
from kvbaton.local_cluster.restart_orders import offer, take
from kvbaton.protocol.ids import Incarnation, WorkerId

CALM = RegistrySettings(ping_s=0.03, suspect_s=30.0, evict_s=60.0, settle_s=0.0)
P0 = WorkerId("p0")


class Town:
    """A key directory, a registry and a worker that does with an order what the test wants."""

    def __init__(self, directory: Path) -> None:
        self.keys = str(directory / "keys")
        keyring.mint(self.keys, ["router", "operator", "p0", "p1", "p0.dp0", "p0.dp1", "p00.dp0"])
        self.server = RegistryServer(keyring.load(self.keys, "router"), settings=CALM)
        self.server.start()
        self.on_drain: Callable[[], None] = lambda: None
        self.clients: list[RegistryGroup] = []

    def join(self, stays: bool = False, name: str = P0, life: int = 0xAB, role: str = "prefill") -> RegistryGroup:
        registration = Registration(
            WorkerId(name), Incarnation(life), role, "127.0.0.1:80", "tcp://127.0.0.1:5000", stays=stays, born=life
        )
        client = RegistryGroup(
            keyring.load(self.keys, name),
            [(WorkerId("router"), self.server.endpoint)],
            registration,
            on_directory=lambda *_: None,
            on_departed=lambda worker, incarnation: None,
            on_drain=self._drain,
            settings=CALM,
        )
        client.start()
        self.clients.append(client)
        self.wait(lambda: registration.peer in [entry.registration.peer for entry in self.server.workers()])
        return client

    def _drain(self) -> None:
        self.on_drain()

    def wait(self, condition: Callable[[], object]) -> None:
        for _ in range(30_000):
            if condition():
                return
            threading.Event().wait(0.001)
        raise AssertionError("not in time")

    def drain(self, worker: str, *words: str) -> int:
        return self.drain_unforced(worker, "--force", *words)

    def drain_unforced(self, worker: str, *words: str) -> int:
        where = ["--keys", self.keys, "--registry", self.server.endpoint]
        return cli.main(["drain", worker, *where, *words])

    def restart(self, worker: str, *words: str) -> int:
        offer(Path(self.keys).parent, ["p0"])
        return cli.main(["restart", worker, "--keys", self.keys, "--registry", self.server.endpoint, *words])

    def line(self) -> OperatorLine:
        return OperatorLine(keyring.load(self.keys, "operator"), (WorkerId("router"), self.server.endpoint))

    def is_draining(self) -> bool:
        return any(entry.draining for entry in self.server.workers())

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    town.close()


def test_it_waits_until_the_worker_is_gone(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    client = town.join()
    leaving = threading.Thread(target=client.close)  # a callback cannot wait for its own thread
    town.on_drain = leaving.start
    assert town.drain("p0", "--json") == 0
    leaving.join()
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["worker"], told["outcome"], told["incarnation"]) == ("p0", "gone", f"{0xAB:016x}")
    assert "kvbaton drain: p0 drains\n" in err and "p0 is gone after" in err
    assert town.server.workers() == ()


def test_a_worker_that_does_not_go_in_time_is_told_with_what_it_holds(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    client = town.join()
    client.tell_held("2 leases")
    town.on_drain = client.drain
    assert town.drain("p0", "--timeout-s", "5", "--json") == 1
    out, err = capsys.readouterr()
    assert (json.loads(out)["outcome"], json.loads(out)["held"]) == ("held", "2 leases")
    assert re.search(r"p0 is still draining after \d+ s, with: 2 leases; it continues, try again", err)
    (entry,) = town.server.workers()
    assert entry.draining


def test_a_worker_that_does_not_end_by_itself_is_done_when_it_is_idle(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    client = town.join(stays=True)
    client.tell_held("nothing")
    town.on_drain = client.drain
    assert town.drain("p0", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "idle"
    assert "p0 is idle and gets no new requests; stop its process now" in err


def test_an_unknown_worker_is_status_1_and_the_names_are_told(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    assert town.drain("p1") == 1
    assert "no worker p1 is registered; registered: none" in capsys.readouterr().err
    town.join()
    assert town.drain("p1", "--json") == 1
    out, err = capsys.readouterr()
    assert "no worker p1 is registered; registered: p0" in err
    assert json.loads(out)["workers"] == ["p0"]


def test_a_registry_that_gives_no_answer_is_status_1(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    town.server.close()
    assert town.drain("p0", "--timeout-s", "0.2", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "no_answer"
    assert town.server.endpoint in err and "operator in its key directory" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["p 0"], "argument WORKER: got 'p 0'"),
        (["p0", "--name", "p0"], "p0 is no operator"),
        (["p0", "--name", "operator-bob"], "operator-bob.json is missing"),
        (["p0", "--registry-name", "nobody"], "nobody: not in the key directory"),
    ],
)
def test_what_the_operator_got_wrong_is_one_line_and_status_2(
    words: list[str], said: str, town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    assert town.drain(*words) == 2
    _, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1


def test_the_last_ready_worker_of_its_role_is_drained_only_by_force(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    first = town.join(stays=True)
    first.tell_held("nothing")
    town.on_drain = first.drain
    assert town.drain_unforced("p0", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "last"
    assert "p0 is the last ready prefill worker: nobody computes prompts" in err and "or add --force" in err
    assert not any(entry.draining for entry in town.server.workers())
    town.join(name="p00.dp0")  # another that can
    assert town.drain_unforced("p0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "idle"
    assert town.drain_unforced("p0") == 0, "it drains already: nothing is asked"
    assert town.drain_unforced("p00.dp0") == 1, "a worker that drains is not there for others"


def test_all_ranks_of_an_engine_do_not_stand_in_for_each_other(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("p0.dp0", "p0.dp1"):
        town.join(stays=True, name=name)
    assert town.drain_unforced("p0", "--json") == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "last"


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_at_a_terminal_the_operator_is_asked(
    answer: str, status: int, town: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    client = town.join(stays=True)
    client.tell_held("nothing")
    town.on_drain = client.drain
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    assert town.drain_unforced("p0") == status
    assert "Drain it? [y/N]" in shown.getvalue()
    assert any(entry.draining for entry in town.server.workers()) == (status == 0)
    capsys.readouterr()


@pytest.mark.parametrize("name", ["p0", "p1"])
def test_a_successor_is_the_next_life_or_a_new_worker_and_nobody_who_served_beside_it(
    name: str, town: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    town.join(name="p00.dp0")
    old = town.join(stays=True)
    old.tell_held("nothing")
    town.on_drain = old.drain
    assert town.drain_unforced("p0", "--wait-for-successor", "--timeout-s", "1.5", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "no_successor" and "start it again" in err
    genuine = command.await_successor

    def one_joins(*given: Any) -> str:
        town.join(name=name, life=0xCD)
        return genuine(*given)

    monkeypatch.setattr(command, "await_successor", one_joins)
    assert town.drain_unforced("p0", "--wait-for-successor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["successor"] == name


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_against_a_registry_that_cannot_tell_who_serves_nothing_is_drained_for_a_successor(
    force: list[str], town: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = RegistryServer._on_drain
    blind = lambda server, operator, message: genuine(server, operator, replace(message, look=False))  # noqa: E731
    monkeypatch.setattr(RegistryServer, "_on_drain", blind)  # as of the release before
    client = town.join(stays=True)
    client.tell_held("nothing")
    town.on_drain = client.drain
    assert town.drain_unforced("p0", "--wait-for-successor", *force) == 2
    assert "did not say who serves" in capsys.readouterr().err
    assert town.restart("p0", *force) == 2 and "did not say who serves" in capsys.readouterr().err
    assert not town.is_draining()
    assert town.drain_unforced("p0", *force) == 0, "without waiting it is as it was"


def test_without_an_answer_about_who_serves_a_worker_is_drained_only_by_force(
    town: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = RegistryServer._on_drain
    busy = lambda server, operator, message: [] if message.look else genuine(server, operator, message)  # noqa: E731
    monkeypatch.setattr(RegistryServer, "_on_drain", busy)
    client = town.join(stays=True)
    client.tell_held("nothing")
    town.on_drain = client.drain
    for words in ([], ["--wait-for-successor"], ["--wait-for-successor", "--force"]):
        assert town.drain_unforced("p0", "--timeout-s", "0.5", "--json", *words) == 1
        assert json.loads(capsys.readouterr().out)["outcome"] == "no_answer"
    assert not town.is_draining()
    assert town.drain("p0") == 0


@pytest.mark.parametrize("lives", [["p0"], ["p0.dp0", "p0.dp1"]])
def test_a_worker_that_has_gone_since_the_last_try_is_started_again(
    lives: list[str], town: Town, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_command, "START_S", 1.0)
    assert town.restart("p0", "--json") == 1, "nobody starts it"
    assert take(Path(town.keys).parent) == ["p0"]
    assert json.loads(capsys.readouterr().out)["outcome"] == "no_successor"

    def start() -> None:
        town.wait(lambda: take(Path(town.keys).parent) == ["p0"])
        for name in lives:
            town.join(name=name)

    monkeypatch.setattr(restart_command, "START_S", 60.0)
    starting = threading.Thread(target=start)
    starting.start()
    assert town.restart("p0", "--json") == 0
    starting.join()
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["successor"]) == ("gone", "p0")


def test_an_engine_with_both_roles_is_the_last_if_only_its_own_ranks_do_half_of_its_work(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("p0.dp0", "p0.dp1"):
        town.join(stays=True, name=name, role="both")
    town.join(name="p1", role="decode")
    assert town.drain_unforced("p0", "--json") == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "last"
    town.join(name="p00.dp0", role="prefill")
    with town.line() as line:
        standing = look_at(line, P0, 30.0, str)
    assert standing.is_ready and not standing.is_last


class Crowd:
    """A registry's answers to looks, on a clock that its slowness moves."""

    def __init__(self, answers: dict[str, DrainState], monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = answers
        self.now = 0.0
        self.asked: list[tuple[str, float]] = []
        monkeypatch.setattr(command.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(command.time, "sleep", self.pass_by)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def look(self, worker: WorkerId, timeout_s: float) -> DrainState | None:
        self.asked.append((worker, timeout_s))
        said = self.answers.get(worker)
        self.now += 0.01 if said is not None else timeout_s
        return said


def test_the_time_for_a_successor_is_over_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"x{number}" for number in range(100))
    silent = Crowd({"p0": DrainState(P0, "unknown", workers=names)}, monkeypatch)
    assert command.await_successor(silent, EngineStanding("p0", {"p0": 5}, "prefill"), 12.0, str) == ""  # type: ignore[arg-type]
    assert silent.now == pytest.approx(12.0) and all(left_s <= 5.0 for _, left_s in silent.asked)
    ranks = Crowd({"p0": DrainState(P0, "unknown", workers=tuple(f"p0.dp{i}" for i in range(100)))}, monkeypatch)
    assert not look_at(ranks, P0, 12.0, str).is_answered  # type: ignore[arg-type]
    assert ranks.now == pytest.approx(12.0)


def test_who_has_another_role_is_not_asked_again_for_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {f"d{number}": DrainState(WorkerId(f"d{number}"), "ready", 7, role="decode") for number in range(9)}
    crowd = Crowd({**said, "p0": DrainState(P0, "unknown", workers=tuple(said))}, monkeypatch)
    assert command.await_successor(crowd, EngineStanding("p0", {"p0": 5}, "prefill"), 2.0, str) == ""  # type: ignore[arg-type]
    asked = [name for name, _ in crowd.asked]
    assert [asked.count(name) for name in said] == [1] * 9 and asked.count("p0") > 2


class Line:
    """A registry's answers, one after the other; the last goes on."""

    def __init__(self, *answers: DrainState | None) -> None:
        self._answers = list(answers)
        self.asked: list[int] = []

    def drain(self, worker: WorkerId, incarnation: int, timeout_s: float) -> DrainState | None:
        self.asked.append(incarnation)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def test_progress_is_told_and_silence_of_the_registry_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LOOK_S", 0.001)
    monkeypatch.setattr(command, "NEWS_S", 0.0)
    busy, told = DrainState(P0, "draining", 5, "1 request"), DrainState(P0, "draining", 5)
    line, news = Line(told, busy, None, DrainState(P0, "gone", 5)), list[str]()
    found = command.drain(line, P0, 30.0, news.append, lambda: 100.0)  # type: ignore[arg-type]
    assert (found.outcome, found.status, line.asked) == ("gone", 0, [0, 5, 5, 5]), "of one life only"
    assert news == [
        "p0 drains",
        "0 s: p0 has not reported what it waits for",
        "0 s: p0 waits for 1 request",
        "0 s: the registry does not respond",
    ]


def test_an_engines_name_drains_all_its_data_parallel_ranks_and_no_others(
    town: Town, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [town.join(stays=True, name=name) for name in ("p0.dp0", "p0.dp1", "p00.dp0")]
    ranks[0].tell_held("nothing")
    ranks[1].tell_held("1 lease")

    def drained() -> set[str]:
        return {str(entry.registration.worker) for entry in town.server.workers() if entry.draining}

    def drain() -> None:
        for client in ranks[:2]:
            client.drain()

    town.on_drain = drain
    assert town.drain("p0", "--timeout-s", "3", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["worker"], told["outcome"], told["held"]) == ("p0", "held", "p0.dp1: 1 lease")
    assert drained() == {"p0.dp0", "p0.dp1"}
    ranks[1].tell_held("nothing")
    assert town.drain("p0", "--json") == 0
    out, err = capsys.readouterr()
    assert [(rank["worker"], rank["outcome"]) for rank in json.loads(out)["ranks"]] == [
        ("p0.dp0", "idle"),
        ("p0.dp1", "idle"),
    ]
    assert "p0 is idle" in err
