"""Contenders by name: which servers each is, what stands before them, and what a user's own line becomes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.serve import serve_run
from kvbaton_proof.bench.serve.contenders import MODEL, contender, spec_of
from kvbaton_proof.bench.serve.serve_run import ServeTarget, vllm_specs
from kvbaton_proof.bench.serve.vllm_site import VllmSite
from kvbaton_proof.cli import bench_goodput
from kvbaton_proof.cli.bench_goodput import MARGIN
from kvbaton_proof.rig import fronts, servers
from kvbaton_proof.rig.connectors import CONNECTORS, Seat, given
from kvbaton_proof.rig.servers import Group, Site, Spec, made

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


def asked(*words: str) -> argparse.Namespace:
    """The arguments of a run, with their defaults."""
    parser = argparse.ArgumentParser()
    bench_goodput.add(parser)
    args = parser.parse_args(["--engine", "vllm", *words])
    bench_goodput.check(args)
    return args


def test_engines_take_their_places_in_turn_and_two_modes_share_one_pair(tmp_path: Path) -> None:
    args = asked("--place", "MIG-a,MIG-b", "--compare", "aggregated,stream,pull,nixl", "--kv-gib", "7", "--decode", "2")
    server = ServerOptions(python="python3", model="-", served_name="kv", kv_gib=7, max_model_len=16640)
    specs = vllm_specs(args, [contender(name) for name in args.compare], server)
    assert [spec.name for spec in specs] == ["aggregated", "kvbaton", "nixl"] and (args.judged, args.margin) == (
        False,
        0,
    )
    for spec in specs:
        found = made(Site(args.device, "python3", tmp_path, tmp_path, {"8b": tmp_path}), spec)
        at = [engine.variables["CUDA_VISIBLE_DEVICES"] for engine in found.workers.values()]
        assert at == ["MIG-a", "MIG-b", "MIG-a"], spec.name
        for engine in found.workers.values():
            words = " ".join(engine.command)
            for word in ("--dtype bfloat16", "FLASH_ATTN", f"--kv-cache-memory-bytes {7 << 30}", "dummy", "16640"):
                assert word in words
            assert "--enforce-eager" not in words, "what is timed has graphs"


def test_a_shape_to_compare_is_exact_and_judged_up_to_what_its_reference_is_sure_of(tmp_path: Path) -> None:
    args = asked("--place", "0,1", "--compare", "stream", "--shape", "small")
    (spec,) = vllm_specs(args, [contender("stream")], ServerOptions(python="python3", model="-", served_name="kv"))
    words = " ".join(made(Site("cuda", "python3", tmp_path, tmp_path, {"small": tmp_path}), spec).p.command)
    assert "--dtype float32" in words and "TRITON_ATTN" in words and "--enforce-eager" in words
    assert args.judged and args.margin == MARGIN and asked("--compare", "stream").margin == 0.0


def test_what_the_operator_sets_for_nixl_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = Seat(name="p0", home=tmp_path, device="cuda", port=1, side_port=2, other_side_port=3)
    assert "cuda_ipc" in CONNECTORS["nixl"].parts(seat)[1]["UCX_TLS"]
    monkeypatch.setenv("UCX_TLS", "cuda_copy,sm,self,tcp")
    assert CONNECTORS["nixl"].parts(seat)[1]["UCX_TLS"] == "cuda_copy,sm,self,tcp", "halves of a GPU have no cuda_ipc"


@pytest.mark.parametrize("down", [["nixl"], ["kvbaton", "nixl"]])
def test_with_places_all_start_together_and_one_that_does_not_come_up_spares_the_others(
    down: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    @contextlib.asynccontextmanager
    async def standing(site: Site, specs: Sequence[Spec], *_: object) -> AsyncIterator[dict[str, Group]]:
        started.append([spec.name for spec in specs])
        yield {spec.name: Group(spec, {}, tmp_path, problem="no memory" * (spec.name in down)) for spec in specs}

    async def whole(*_: object) -> None:
        return None

    monkeypatch.setattr(servers, "standing", standing)
    monkeypatch.setattr(VllmSite, "whole", whole)
    monkeypatch.setattr(Group, "url", "http://127.0.0.1:1")
    problems: list[str] = []
    args = asked("--place", "0,1", "--compare", "stream,pull,nixl")

    async def names() -> list[str]:
        server = ServerOptions(python="python3", model="-", served_name="kv")
        async with contextlib.AsyncExitStack() as stack:
            found = await serve_run.started(args, server, stack, problems, print, asyncio.Event())
            return [target.name for target in found]

    if len(down) == 1:
        assert asyncio.run(names()) == ["stream", "pull"] and problems == ["nixl: no memory"]
    else:
        with pytest.raises(CommandError, match="kvbaton: no memory"):
            asyncio.run(names())
    assert started == [["kvbaton", "nixl"]]


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
