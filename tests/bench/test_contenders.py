"""Contenders by name: which servers each is, what stands before them, and what a user's own line becomes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.serve.contenders import MODEL, contender, spec_of
from kvbaton_proof.bench.serve.serve_run import ServeTarget
from kvbaton_proof.rig import fronts
from kvbaton_proof.rig.connectors import CONNECTORS, Seat, given
from kvbaton_proof.rig.servers import Group, Site, made

SHAPE = {"max_model_len": 1024, "transport": "shm", "router_args": ("--fallback", "local")}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test makes known is known in it alone; vllm-router is there."""
    monkeypatch.setattr(fronts, "find_vllm_router", lambda *_: "vllm-router")
    known = dict(CONNECTORS)
    yield
    CONNECTORS.clear()
    CONNECTORS.update(known)


def group(tmp_path: Path, name: str, prefill: int = 1, decode: int = 1, lease_s: float | None = None) -> Group:
    site = Site("cpu", "python3", tmp_path, tmp_path, {MODEL: tmp_path})
    return made(site, spec_of(contender(name), prefill=prefill, decode=decode, lease_s=lease_s, **SHAPE))  # type: ignore[arg-type]


def config(group: Group, name: str) -> dict[str, object]:
    words = list(group.engines[name].command)
    told: dict[str, object] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return told


def test_names_are_taken_apart_and_modes_share_a_cluster_where_a_router_knows_them() -> None:
    assert contender("pull").cluster == contender("push").cluster == "kvbaton"
    assert contender("pull").header == "pull" and contender("nixl").header is None
    assert contender("stream+turns+store").cluster == "kvbaton-store-turns"
    behind = contender("stream@vllm-router")
    assert (behind.header, behind.cluster) == (None, "kvbaton-stream-vllm-router")
    assert ServeTarget("nixl@toy", "").salt == "nixl-toy", "vLLM refuses a cache_salt with an @"
    for bad in ("pusch", "nixl+turns", "pull@nginx", "pull@", "pull+tunrs"):
        with pytest.raises(ValueError, match="expected some of aggregated, single, pull"):
            contender(bad)


def test_aggregated_engines_are_as_many_as_the_pair_has_and_have_no_connector(tmp_path: Path) -> None:
    for name, wanted in (("aggregated", ["d0", "d1", "d2"]), ("single", ["d0"]), ("offloading", ["d0", "d1", "d2"])):
        found = group(tmp_path, name, 1, 2)
        assert list(found.workers) == wanted and found.url == found.router.url
        assert ("--kv-transfer-config" in found.engines["d0"].command) == (name == "offloading")
        assert found.router.command.count("--decode-url") == len(wanted)
        assert "--prefill-url" not in found.router.command


def test_words_of_the_user_are_every_engines(tmp_path: Path) -> None:
    spec = spec_of(contender("pull"), prefill=1, decode=1, lease_s=None, args=("--max-num-seqs", "8"), **SHAPE)  # type: ignore[arg-type]
    for engine in made(Site("cpu", "python3", tmp_path, tmp_path, {MODEL: tmp_path}), spec).workers.values():
        assert "--max-num-seqs 8" in " ".join(engine.command)


def test_each_front_is_told_the_same_engines(tmp_path: Path) -> None:
    for name in ("nixl", "nixl@vllm-router"):
        found = group(tmp_path, name, 2, 2)
        told = " ".join(found.router.command)
        assert list(found.workers) == ["p0", "p1", "d0", "d1"] and all(
            each.url in told for each in found.workers.values()
        )
    assert [
        word for word in group(tmp_path, "aggregated@vllm-router").router.command if "url" in word or "router" in word
    ] == ["vllm-router", "--worker-urls"]
    toy = group(tmp_path, "nixl@toy")
    assert list(toy.router.command[-2:]) == [toy.p.url, toy.d.url]
    with pytest.raises(CommandError, match="one P and one D"):
        group(tmp_path, "nixl@toy", 1, 2)


def test_modes_leases_turns_and_stores_reach_the_connector(tmp_path: Path) -> None:
    fixed = config(group(tmp_path, "stream@vllm-router", lease_s=0.5), "p0")["kv_connector_extra_config"]
    assert isinstance(fixed, dict) and (fixed["mode"], fixed["lease_s"], "registry" in fixed) == ("stream", 0.5, False)
    nixl = config(group(tmp_path, "nixl", lease_s=0.5), "d0")["kv_connector_extra_config"]
    assert nixl == {"num_threads": 0, "kv_lease_duration": 1}, "NIXL knows whole seconds"
    kept = group(tmp_path, "pull+turns+store")
    own = config(kept, "p0")["kv_connector_extra_config"]
    assert isinstance(own, dict) and own["turn_s"] and own["store"] and "store" in kept.engines
    assert config(kept, "p0")["kv_role"] == "kv_both" and "--turn-s" in kept.router.command


def test_anybodys_connector_is_one_line_or_a_file(tmp_path: Path) -> None:
    given('plain={"kv_connector": "X", "kv_role": "kv_both"}')
    assert config(group(tmp_path, "plain"), "d0") == {
        "kv_connector": "X", "kv_role": "kv_both", "kv_connector_extra_config": {},
    }  # fmt: skip
    with pytest.raises(CommandError, match="give it a lease_field"):
        group(tmp_path, "plain", lease_s=1.0)
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({
        "config": {"kv_connector": "Y", "kv_port": "{side_port}"}, "p": {"kv_role": "kv_producer"},
        "d": {"kv_role": "kv_consumer"}, "variables": {"AT": "{port}"}, "lease_field": "ttl", "source_field": "from",
    }))  # fmt: skip
    made = given(f"theirs={file}")
    seats = [
        Seat(name=name, home=tmp_path, device="cpu", port=1, side_port=2, other_side_port=3) for name in ("p0", "d1")
    ]
    told = [made.parts(seat) for seat in seats]
    assert [config["kv_role"] for config, _ in told] == ["kv_producer", "kv_consumer"]
    assert told[0] == (
        {"kv_connector": "Y", "kv_port": "2", "kv_role": "kv_producer", "kv_connector_extra_config": {}}, {"AT": "1"},
    )  # fmt: skip
    assert not made.takes_all_poison


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "expected NAME=JSON or NAME=FILE"),
        ("nixl={}", "which is built in"),
        ("x=no-such-file", "no-such-file: No such file"),
        ('x={"kv_role": "kv_both"}', "has no kv_connector"),
        ('x={"config": {"kv_connector": "X"}, "hnded": "y"}', "unknown field `hnded`"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        given(text)
