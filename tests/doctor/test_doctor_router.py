"""`kvbaton doctor --router`: a cluster that cannot serve is never well, whatever its workers say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbaton.cli.main import main
from kvbaton.doctor.router_checks import JudgedWorker, LeftWorker, SeenRouter, findings, lines
from tests.cli.talker import talker, whole

P0, D0 = JudgedWorker("p0", "http://p", "prefill", "serving"), JudgedWorker("d0", "http://d", "decode", "serving")
WELL: dict[str, Any] = {"url": "http://r", "status": "ok", "pairs": {"pull": 1, "push": 0}, "listed": (P0, D0)}
LEFT = LeftWorker("p0", "prefill", 12.0)


def listed(worker: JudgedWorker, state: str, unpaired: str = "") -> JudgedWorker:
    return JudgedWorker(worker.name, worker.url, worker.role, state, unpaired=unpaired)


def found(**changes: Any) -> dict[str, str]:
    """Code and text of each finding about a router that is well but for `changes`."""
    told = list(findings(SeenRouter(**{**WELL, **changes})))
    assert all(each.fix for each in told)
    return {f"{each.severity} {each.code} {each.where}": f"{each.found} | {each.fix}" for each in told}


def test_of_a_cluster_that_serves_there_is_nothing_to_say() -> None:
    assert found() == found(listed=(JudgedWorker("a", "", "both", "serving"), listed(D0, "suspect"))) == {}
    assert list(lines(SeenRouter(**WELL))) == ["router http://r: ok; pairs: pull 1, push 0"]


@pytest.mark.parametrize(("status", "said"), [("unavailable", "are refused"), ("degraded", "compute prompts themsel")])
def test_a_role_without_a_worker_is_an_error_whether_or_not_d_helps_out(status: str, said: str) -> None:
    told = found(status=status, pairs={"pull": 0}, listed=(D0,))
    (text,) = (told[key] for key in told if key == "error role-missing role prefill")
    assert "none is listed" in text and said in text and "kvbaton worker --role prefill" in text
    told = found(status="unavailable", pairs={"pull": 0}, listed=(P0, listed(D0, "broken")))
    assert "d0 broken" in told["error role-missing role decode"] and len(told) == 1
    assert len(found(status="unavailable", pairs={}, listed=())) == 2


def test_who_left_is_named_with_its_role_and_as_what_to_start_again() -> None:
    told = found(status="degraded", pairs={"pull": 0}, listed=(D0,), left=(LEFT,))
    assert "start p0 again" in told["error role-missing role prefill"]
    assert "left the list 12 s ago without a drain" in told["warning worker-lost worker p0"]
    assert set(found(left=(LeftWorker("p1", "prefill", 3.0),))) == {"warning worker-lost worker p1"}


def test_workers_that_do_not_fit_are_an_error_if_none_do_and_else_a_warning() -> None:
    told = found(status="degraded", pairs={"pull": 0}, reason="p0 and d0 differ in their compatibility key")
    assert "differ in their compat" in told["error cluster-unpaired router http://r"]
    told = found(listed=(P0, D0, JudgedWorker("d1", "http://d1", "decode", "serving", unpaired="d1 speaks moriio")))
    assert list(told) == ["warning worker-unpaired worker d1"] and "d1 speaks moriio" in "".join(told.values())
    assert found(listed=(P0, D0, JudgedWorker("d1", "", "decode", "draining", unpaired="d1 is draining"))) == {}


def test_a_router_that_drains_takes_nothing_new() -> None:
    assert list(found(status="draining")) == ["error router-draining router http://r"]


@pytest.mark.parametrize("is_newer", [True, False])
def test_what_a_router_of_now_and_of_the_release_before_says(
    capsys: pytest.CaptureFixture[str], is_newer: bool
) -> None:
    left = {"left": [{"name": "p0", "role": "prefill", "url": "http://p", "ago_s": 9.5}]} if is_newer else {}
    told = {"status": "unavailable", "workers": {}, "pairs": {"pull": 0}, "reason": "no prefill worker is registered"}
    pages = {
        "/health": whole(json.dumps(told).encode(), b"503 Service Unavailable", b"Retry-After: 1\r\n"),
        "/metrics": whole(b'kvbaton_router_pairs{mode="pull"} 0\n'),
        "/d0/stats": whole(b"{}"),
    }
    with talker(lambda path: pages[path]) as url:
        d0 = {"name": "d0", "role": "decode", "url": f"{url}/d0", "state": "serving", "unpaired": "no prefill worker"}
        pages["/workers"] = whole(json.dumps({"workers": [d0], **left}).encode())
        assert main(["doctor", "--json", "--router", url]) == 1
        told = json.loads(capsys.readouterr().out)
        assert main(["doctor", "--router", url]) == 1
    codes = [each["code"] for each in told["findings"] if each["where"] != "/dev/shm"]
    assert [code for code in codes if code in ("role-missing", "alert-critical", "worker-lost")] == [
        "role-missing", "alert-critical", *(["worker-lost"] if is_newer else []),
    ]  # fmt: skip
    assert told["router"]["status"] == "unavailable" and told["well"] is False
    out = capsys.readouterr().out
    assert "error [role-missing] role prefill: no prefill worker can be asked" in out and "KvbatonNoPair" in out
