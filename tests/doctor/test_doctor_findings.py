"""`kvbaton doctor` on planted mistakes: each is found by its code; what is healthy has none."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.cli.main import main
from kvbaton.control import key_room, keyring
from kvbaton.doctor import machine_checks
from kvbaton.engines.vllm.launch.launching import CONNECTOR, PYTHON_VARIABLE
from kvbaton.observe.codes.entry import Severity
from kvbaton.observe.codes.findings import SEVERITY
from kvbaton.processes.child_process import free_ports
from kvbaton.transports import catalogue
from kvbaton.transports.core import mover

Found = list[dict[str, str]]
HERE = "127.0.0.1"
ELSEWHERE = "192.0.2.7"  # of no machine (RFC 5737)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}


class Place:
    """Two configurations that are well, with real keys, ports and a model; a plant changes one thing."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.keys = base / "keys"
        keyring.mint(self.keys, ["router", "operator", "p0", "d0"])
        self.ports = free_ports(2)
        self.p = self._launch("p0", "kv_producer", self.ports[0])
        self.d = self._launch("d0", "kv_consumer", self.ports[1])
        self.more: list[str] = []
        self.opened = ExitStack()

    def _launch(self, name: str, role: str, port: int) -> dict[str, Any]:
        extra = {
            "name": name,
            "keys": str(self.keys),
            "registry": "tcp://127.0.0.1:7700",
            "http_address": f"{HERE}:{port}",
        }
        transfer = {**CONNECTOR, "kv_role": role, "kv_load_failure_policy": "recompute"}
        model = self.model(f"model-{name}")
        return {
            "model": str(model), "host": HERE, "port": port, "dtype": "float32",
            "kv-transfer-config": {**transfer, "kv_connector_extra_config": extra},
        }  # fmt: skip

    def model(self, name: str, weights: bytes = b"weights", **changes: Any) -> Path:
        """A directory of its own for each engine, as on two hosts; the files are the same."""
        model = self.base / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPE | changes))
        (model / "model.safetensors").write_bytes(len(weights).to_bytes(8, "little") + weights)
        return model

    def extra(self, side: str) -> dict[str, Any]:
        return self.transfer(side)["kv_connector_extra_config"]  # type: ignore[no-any-return]

    def transfer(self, side: str) -> dict[str, Any]:
        return getattr(self, side)["kv-transfer-config"]  # type: ignore[no-any-return]

    def words(self) -> list[str]:
        words = ["doctor", "--json", "--device", "cpu", *self.more]
        for flag, config in (("prefill", self.p), ("decode", self.d)):
            path = self.base / f"{flag}.json"
            path.write_text(json.dumps(config))
            words += [f"--{flag}", str(path)]
        return words


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv(PYTHON_VARIABLE, str(python_with(tmp_path, "0.32.0")))
    made = Place(tmp_path)
    yield made
    made.opened.close()


def python_with(base: Path, version: str) -> Path:
    """Stands in for a Python that has this vLLM; which it is, is all that it is asked."""
    path = base / f"python-{version}"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def told(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, Found]:
    status = main(words)
    found = json.loads(capsys.readouterr().out)
    assert found["well"] is (status == 0)
    assert all(each["severity"] != Severity.NOTE for each in found["findings"])
    return status, [*found["findings"], *found["notes"]]


def codes(found: Found, *severities: Severity) -> list[str]:
    return [each["code"] for each in found if not severities or each["severity"] in severities]


# --- well


def test_a_healthy_machine_with_a_healthy_configuration_has_neither_errors_nor_warnings(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.more = ["--keys", str(place.keys), "--port", str(free_ports(1)[0])]
    status, found = told(capsys, place.words())
    assert status == 0 and codes(found, Severity.ERROR, Severity.WARNING) == []


def test_a_healthy_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = told(capsys, ["doctor", "--json"])
    assert status == 0 and codes(found, Severity.ERROR, Severity.WARNING) == []


def test_workers_of_our_own_engine_are_well_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keyring.mint(tmp_path / "keys", ["router", "p0", "d0"])
    common = f"--keys {tmp_path / 'keys'} --registry tcp://127.0.0.1:7700"
    p = f"kvbaton worker --name p0 --role prefill {common} --tp 2 --block-tokens 32"
    status, found = told(
        capsys, ["doctor", "--json", "--prefill", p, "--decode", f"kvbaton worker --name d0 --role decode {common}"]
    )
    assert status == 0 and codes(found, Severity.ERROR, Severity.WARNING) == []


# --- planted


def taken(place: Place) -> None:
    sock = place.opened.enter_context(socket.socket())
    sock.bind((HERE, place.ports[0]))
    sock.listen()


def twice(place: Place) -> None:
    place.d["port"], place.extra("d")["http_address"] = place.ports[0], f"{HERE}:{place.ports[0]}"


def beyond_range(place: Place) -> None:
    place.extra("d")["control_port"] = 70_000


def mismatched(place: Place) -> None:
    place.extra("p")["http_address"] = f"{HERE}:{place.ports[0] + 1}"


def readable(place: Place) -> None:
    (place.keys / "secret" / "p0.json").chmod(0o644)


def writable(place: Place) -> None:
    (place.keys / "secret").chmod(0o777)


def garbled(place: Place) -> None:
    (place.keys / "public" / "operator.json").write_text("{}")


def without_tickets(place: Place) -> None:
    (place.keys / "tickets.json").unlink()


def two_clusters(place: Place) -> None:
    keyring.mint(place.base / "others", ["router", "p0", "d0"])
    place.extra("d")["keys"] = str(place.base / "others")


def half_rotated(place: Place) -> None:
    key_room.rotate(place.keys, "p0")


def tickets_half_rotated(place: Place) -> None:
    key_room.prepare_tickets(place.keys)


def other_weights(place: Place) -> None:
    place.d["model"] = str(place.model("retrained", b"Weights"))


def other_config(place: Place) -> None:
    place.d["model"] = str(place.model("longer", rope_theta=5))


def three_ranks(place: Place) -> None:
    place.p["tensor-parallel-size"] = 3


def space(place: Place) -> None:
    """As the command that starts it, in which variables are seen."""
    transfer = json.dumps(place.transfer("p"))
    more = f"--host {HERE} --port {place.ports[0]} --dtype float32"
    command = f"VLLM_CPU_KVCACHE_SPACE=1000000 vllm serve {place.p['model']} {more} --kv-transfer-config '{transfer}'"
    place.more = ["--prefill", command]
    place.extra("p")["name"] = "p1"
    keyring.add(place.keys, "p1")
    port = free_ports(1)[0]
    place.p["port"], place.extra("p")["http_address"] = port, f"{HERE}:{port}"


def old_vllm(place: Place) -> None:
    place.more = ["--vllm-python", str(python_with(place.base, "0.29.1"))]


def new_vllm(place: Place) -> None:
    place.more = ["--vllm-python", str(python_with(place.base, "0.40.0rc1"))]


def both_hosts(place: Place, p: str, d: str) -> None:
    place.extra("p")["control_host"], place.extra("d")["control_host"] = p, d


def two_hosts_and_shm(place: Place) -> None:
    both_hosts(place, ELSEWHERE, "192.0.2.8")
    for side in "pd":
        place.extra(side)["transport"] = "shm"


def in_the_clear(place: Place) -> None:
    both_hosts(place, ELSEWHERE, ELSEWHERE)
    for side in "pd":
        place.extra(side).update(transport="tcp", encrypt="off")


def peers_without_ports(place: Place) -> None:
    for side, other in ("pd", "dp"):
        del place.extra(side)["registry"]
        place.extra(side)["peers"] = {f"{other}0": "tcp://127.0.0.1:7200"}


def in_extra(side: str, **fields: Any) -> Callable[[Place], None]:
    return lambda place: place.extra(side).update(fields)


def in_transfer(side: str, **fields: Any) -> Callable[[Place], None]:
    return lambda place: place.transfer(side).update(fields)


def in_launch(side: str, **fields: Any) -> Callable[[Place], None]:
    return lambda place: getattr(place, side).update({name.replace("_", "-"): value for name, value in fields.items()})


def with_words(*words: str) -> Callable[[Place], None]:
    return lambda place: setattr(place, "more", list(words))


PLANTED: dict[str, tuple[str, Callable[[Place], object], str, str]] = {
    # what was done: (its code, how, what the finding says, what its fix says)
    "a port that another process has": ("port-taken", taken, "cannot be bound", "ss -ltnp"),
    "one port for two engines": ("port-twice", twice, "are both 127.0.0.1:", "another port"),
    "a port beyond the range": ("port-range", beyond_range, "control_port: got 70000", "0 to 65535"),
    "an address of another port": ("http-mismatch", mismatched, "listens on port", "set http_address to 127.0.0.1:"),
    "keys that are not there": ("keys-missing", in_extra("p", keys="nowhere"), "no key directory", "kvbaton keys new"),
    "no keys at all": (
        "keys-missing",
        lambda place: place.extra("d").pop("keys"),
        "keys: got None",
        "kvbaton keys new",
    ),
    "no tickets.json": ("keys-missing", without_tickets, "tickets.json is missing", "copy tickets.json"),
    "a secret that others can read": ("keys-open", readable, "has mode 0644", "chmod 600"),
    "a directory that all can write": ("keys-open", writable, "can be written by everybody", "chmod 700"),
    "a name without a key": ("keys-name", in_extra("p", name="p9"), "p9 is not in", "kvbaton keys add"),
    "a registry without a key": ("keys-name", in_extra("d", registry_name="front"), "front is not in", "keys add"),
    "a garbled key file": ("keys-broken", garbled, "public/operator.json", "restore"),
    "keys of two clusters": (
        "keys-cluster",
        two_clusters,
        "neither has both",
        "copy public/ and tickets.json",
    ),
    "a rotation not finished": ("keys-rotating", half_rotated, "p0: its key from before", "--finish"),
    "ticket keys not finished": ("keys-rotating", tickets_half_rotated, "is waiting to be used", "--tickets"),
    "no shared memory": ("shm-small", with_words("--shm", "/proc"), "/proc has 0 MiB free", "--shm-size=1g"),
    "no mount for it": ("shm-small", with_words("--shm", "/no/such"), "No such file", "mount -t tmpfs"),
    "KV beyond the memory": ("memory-small", space, "VLLM_CPU_KVCACHE_SPACE", "lower"),
    "an old vLLM": ("vllm-old", old_vllm, "vLLM 0.29.1; supported are 0.30 to 0.33", "vllm>=0.30,<0.34"),
    "a vLLM from the future": ("vllm-untested", new_vllm, "vLLM 0.40.0rc1", "vllm>=0.30,<0.34"),
    "no Python where vLLM is": (
        "vllm-python",
        with_words("--vllm-python", "/no/python"),
        "not a program",
        "name vLLM's",
    ),
    "a setting misspelt": (
        "setting-unknown",
        in_extra("p", leese_s=15),
        "leese_s: unknown setting",
        "did you mean lease_s?",
    ),
    "a key of vLLM's misspelt": (
        "setting-unknown",
        in_transfer("p", kv_rolle="x"),
        "kv_rolle",
        "did you mean kv_role?",
    ),
    "a text for a number": ("setting-invalid", in_extra("d", lease_s="long"), "lease_s", "lease_s"),
    "an unknown data plane": ("setting-invalid", in_extra("d", transport="tpc"), "transport: got 'tpc'", "shm"),
    "tickets that live too long": (
        "ticket-ttl",
        in_extra("p", ticket_ttl_s=7200),
        "ticket_ttl_s: got 7200",
        "at most 3600",
    ),
    "a hold below the lease": ("time-contradiction", in_extra("p", max_hold_s=5), "below lease_s", "max_hold_s"),
    "a wait beyond the hold": (
        "time-contradiction",
        in_extra("d", transfer_timeout=500),
        "above max_hold_s",
        "at most 180",
    ),
    "D waits longer than P holds": (
        "time-contradiction",
        in_extra("p", max_hold_s=45),
        "P releases first",
        "raise max_hold_s",
    ),
    "two decoders": (
        "role-wrong",
        in_transfer("p", kv_role="kv_consumer"),
        "kv_role: got 'kv_consumer'",
        "kv_producer",
    ),
    "a P that loads from a store, and vLLM does not know": (
        "role-wrong",
        in_extra("p", store="tcp://127.0.0.1:7710"),
        "kv_producer with a store",
        '"kv_both", and "role": "prefill"',
    ),
    "a policy that nobody knows": (
        "policy-unknown",
        in_transfer("d", kv_load_failure_policy="retry"),
        "retry",
        "recompute",
    ),
    "a module that is not there": (
        "module-path",
        in_transfer("p", kv_connector_module_path="kvbaton"),
        "'kvbaton'",
        "kvbaton.integrations.vllm",
    ),
    "another connector": ("connector-other", in_transfer("d", kv_connector="NixlConnector"), "Nixl", "BatonConnector"),
    "listening for peers everywhere": (
        "control-wildcard",
        in_extra("p", control_host="0.0.0.0"),
        "0.0.0.0",
        "control_host",
    ),
    "an open door": ("http-open", in_launch("p", host="0.0.0.0"), "listens on 0.0.0.0 without --api-key", "--host"),
    "a model that is not there": (
        "model-missing",
        in_launch("d", model="/no/model"),
        "no config.json",
        "name the directory",
    ),
    "a data-parallel rank without a key": (
        "keys-name",
        in_launch("p", data_parallel_size=2),
        "p0.dp0 is not in",
        "p0.dp0, or fix the name",
    ),
    "ranks that come and go": (
        "parallel-unsupported",
        in_launch("p", enable_elastic_ep=True),
        "enable_elastic_ep",
        "start another engine",
    ),
    "scales of its own": ("parallel-unsupported", in_launch("p", calculate_kv_scales=True), "scales", "static"),
    "another block size": (
        "pair-differs",
        in_launch("p", block_size=32),
        "block_size: P has '32', D has '128'",
        "the same",
    ),
    "another dtype": (
        "pair-differs",
        in_launch("d", dtype="half"),
        "dtype: P has 'float32', D has 'float16'",
        "the same",
    ),
    "another KV dtype": (
        "pair-differs",
        in_launch("d", kv_cache_dtype="fp8"),
        "kv_cache_dtype: P has 'auto'",
        "the same",
    ),
    "other weights": ("pair-differs", other_weights, "weights: P has", "the same weights"),
    "another configuration": (
        "pair-differs",
        other_config,
        "config.json rope_theta: P has None, D has 5",
        "the same model",
    ),
    "another name for the weights": ("pair-differs", in_extra("d", model_id="v2"), "model_id: P has ''", "the same"),
    "three ranks for eight heads": ("pair-shape", three_ranks, "3 does not divide the model's 8", "divides"),
    "no plane in common": (
        "pair-transport",
        lambda place: [in_extra("p", transport="shm")(place), in_extra("d", transport="tcp")(place)],
        "P offers shm, D offers tcp",
        "the same transport",
    ),
    "checksums on one side": ("pair-transport", in_extra("p", checksum="full"), "shm+sums", "checksum"),
    "two hosts and shared memory": ("pair-transport", two_hosts_and_shm, "within one host only", "add tcp"),
    "two registries": (
        "pair-registry",
        in_extra("d", registry="tcp://127.0.0.1:7701"),
        "7700, D has tcp",
        "the same registry",
    ),
    "peers that cannot be found": ("pair-registry", peers_without_ports, "uses an ephemeral port", "control_port"),
    "one name for two": ("pair-name", in_extra("d", name="p0"), "both are p0", "its own name"),
    "no mode in common": (
        "pair-modes",
        lambda place: [in_extra("p", modes=["pull"])(place), in_extra("d", modes=["push"], mode="push")(place)],
        "P has pull, D has push",
        "the same modes",
    ),
    "loopback on one side": ("pair-unreachable", in_extra("d", control_host=ELSEWHERE), ELSEWHERE, "set both"),
    "a plane in the clear": (
        "plane-unencrypted",
        in_the_clear,
        "since encrypt is off",
        "encrypt auto",
    ),
    "no configuration at all": (
        "config-unreadable",
        with_words("--prefill", "/no/such.json"),
        "No such file",
        "give the JSON",
    ),
    "broken JSON": ("config-unreadable", with_words("--decode", "{"), "not JSON", "give the JSON"),
    "models that are elsewhere": (
        "pair-model",
        lambda place: [in_launch("p", model="org/a")(place), in_launch("d", model="org/b")(place)],
        "P has org/a, D has org/b",
        "model_id",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_found_with_its_fix(what: str, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    code, plant, said, fix = PLANTED[what]
    plant(place)
    status, found = told(capsys, place.words())
    assert code in codes(found), found
    each = next(each for each in found if each["code"] == code and said in each["found"])
    assert fix in each["fix"] and each["severity"] == SEVERITY[code]
    assert status == (1 if Severity.ERROR in [one["severity"] for one in found] else 0)


def test_ten_mistakes_at_once_in_a_process_of_its_own_and_none_without_them(place: Place) -> None:
    healthy = copy.deepcopy((place.p, place.d))
    plants = [
        "a port that another process has",
        "a rotation not finished",
        "a secret that others can read",
        "a setting misspelt",
        "a wait beyond the hold",
        "two decoders",
        "a policy that nobody knows",
        "another block size",
        "other weights",
        "two registries",
        "an open door",
    ]
    words = [sys.executable, "-m", "kvbaton.cli.main"]
    clean = subprocess.run([*words, *place.words()], capture_output=True, text=True, timeout=60, check=False)
    assert clean.returncode == 0, clean.stderr
    assert json.loads(clean.stdout)["findings"] == []
    place.p, place.d = healthy
    for what in plants:
        PLANTED[what][1](place)
    place.more = ["--shm", "/proc"]
    few = ["sh", "-c", 'ulimit -n 512 && exec "$@"', "sh"]
    done = subprocess.run([*few, *words, *place.words()], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and not done.stderr
    expected = {PLANTED[what][0] for what in plants} | {"shm-small", "files-few"}
    assert expected <= set(codes(json.loads(done.stdout)["findings"])) and len(expected) >= 10


ODD: list[Any] = [None, 0, -1, 1e308, "", "x" * 5000, "\0", "é", [], {}, [1], {"a": 1}, True, "127.0.0.1:70000", 10**20]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_stands_in_a_configuration_there_is_a_verdict(
    seed: int, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """No odd value ends it: drawn from a seed, in both engines and in the model's file."""
    rng = random.Random(seed)
    for side in "pd":
        for fields in (getattr(place, side), place.transfer(side), place.extra(side)):
            kept = "kv-transfer-config", "kv_connector_extra_config"
            names = [*(name for name in fields if name not in kept), "tensor-parallel-size", "peers", "control_host"]
            fields[rng.choice(names)] = rng.choice(ODD)
    model = place.base / "model-p0" / "config.json"
    shape = json.loads(model.read_text())
    model.write_text(json.dumps(shape | {rng.choice(list(shape)): rng.choice(ODD), "text_config": rng.choice(ODD)}))
    status, found = told(capsys, place.words())
    assert status in (0, 1) and (status == 1) == (Severity.ERROR in [each["severity"] for each in found])


# --- what cannot be planted with a file


BARE = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "torch", "aiohttp", "yaml"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Without())
from kvbaton.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_it_needs_neither_vllm_nor_what_serves_http(place: Place) -> None:
    words = [sys.executable, "-c", BARE, *place.words()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["well"], done.stderr


def test_a_python_that_is_too_old() -> None:
    assert [each.code for each in machine_checks.python((3, 10))] == ["python-version"]
    assert list(machine_checks.python((3, 11))) == []


def test_a_machine_without_the_c_mover_or_encryption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    slow = mover.choose_mover(pure_python=True)
    monkeypatch.setattr(mover, "choose_mover", lambda: slow)
    monkeypatch.setattr(machine_checks, "can_seal", lambda: False)
    monkeypatch.setattr("kvbaton.security.sealing.can_seal", lambda: False)
    place.extra("p")["control_host"] = place.extra("d")["control_host"] = ELSEWHERE
    status, found = told(capsys, place.words())
    assert status == 1 and {"mover-missing", "seal-missing", "encrypt-missing"} <= set(codes(found))
    assert "pip install 'cryptography>=47'" in {each["fix"] for each in found}


def test_planes_that_cannot_be_used_or_are_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    for name, problem in (("mooncake", "gone"), ("nixl", "")):
        had = catalogue.PLANES[name]
        made = msgspec.structs.replace(had, usable=lambda problem=problem: problem, in_auto=lambda: True)
        monkeypatch.setitem(catalogue.PLANES, name, made)
    place.extra("p")["transport"] = "mooncake"
    place.more = ["--transport", "nixl"]
    status, found = told(capsys, place.words())
    (open_one,) = (each for each in found if each["code"] == "plane-open")
    (unusable,) = (each for each in found if each["code"] == "no-plane")
    assert status == 1 and "nixl is not encrypted" in open_one["found"]
    assert "mooncake cannot be used here: gone" in unusable["found"] and "pip install mooncake" in unusable["fix"]


def test_notes_are_no_verdict(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = place.base / "shmem_enabled"
    huge.write_text("always [never]")
    monkeypatch.setattr(machine_checks, "HUGE", huge)
    del place.transfer("p")["kv_load_failure_policy"]
    free = free_ports(1)[0]  # and no connection takes it meanwhile: the range is only said to hold it
    (place.base / "range").write_text(f"{free}\t{free}\n")
    monkeypatch.setattr(machine_checks, "EPHEMERAL", place.base / "range")
    place.more = ["--port", f"{ELSEWHERE}:80", "--port", str(free)]
    status, found = told(capsys, place.words())
    notes = {"huge-pages", "policy-default", "host-foreign", "port-ephemeral"}
    assert status == 0 and notes <= set(codes(found, Severity.NOTE)) and codes(found, Severity.WARNING) == []


def test_a_configuration_for_another_host_is_not_held_to_this_one(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its secret, nor its model, nor its ports are expected here."""
    for side, name in (("p", "p0"), ("d", "d0")):
        place.extra(side)["control_host"] = ELSEWHERE if side == "p" else "192.0.2.8"
        getattr(place, side).update({"model": "/models/m", "host": place.extra(side)["control_host"]})
        place.extra(side)["http_address"] = f"{place.extra(side)['control_host']}:{getattr(place, side)['port']}"
        (place.keys / "secret" / f"{name}.json").unlink()
    status, found = told(capsys, place.words())
    assert status == 0 and codes(found, Severity.ERROR, Severity.WARNING) == []
    assert codes(found).count("host-foreign") == 2


def test_the_memory_of_a_container_bounds_that_of_its_host(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8192 kB\n")
    assert machine_checks.available_bytes(tmp_path / "meminfo", tmp_path) == 8 << 20
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert machine_checks.available_bytes(tmp_path / "meminfo", tmp_path) == 2_000_000
    assert machine_checks.available_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("version", "code"),
    [("0.30.0", []), ("0.32.1+cpu", []), ("0.29.9", ["vllm-old"]), ("1.0", ["vllm-untested"]), ("unknown", [])],
)
def test_versions_of_vllm(version: str, code: list[str]) -> None:
    assert [each.code for each in machine_checks.vllm_findings(version)] == code


def test_every_code_is_planted_somewhere() -> None:
    """Those of a cluster are in `test_doctor.py`."""
    elsewhere = {
        "python-version", "mover-missing", "seal-missing", "encrypt-missing", "plane-open", "no-plane", "huge-pages",
        "policy-default", "host-foreign", "port-ephemeral", "files-few", "worker-silent", "clock-off",
        "role-missing", "worker-lost", "worker-unpaired", "cluster-unpaired",
        "router-draining",  # test_doctor_router.py
        "router-silent", "alert-critical", "alert-warning",  # test_doctor_cluster.py, test_doctor_alerts.py
        "decode-alone",  # test_doctor_alone.py
        "numpy-missing",  # test_plain_install.py
        "gpu-container", "gpu-ipc", "gpu-missing", "gpu-peer", "memlock-small",  # test_doctor_gpu.py
    }  # fmt: skip
    assert {code for code, *_ in PLANTED.values()} | elsewhere == set(SEVERITY)


def test_no_secret_is_shown(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.more = ["--keys", str(place.keys)]
    assert main(place.words()) == 0
    text = capsys.readouterr().out
    secrets = [json.loads(path.read_text())["secret"] for path in (place.keys / "secret").iterdir()]
    secrets += json.loads((place.keys / "tickets.json").read_text())["keys"]
    assert len(secrets) == 5 and not [secret for secret in secrets if secret in text]
    assert os.environ[PYTHON_VARIABLE]  # and no vLLM was imported for any of this
    assert "vllm" not in sys.modules
