"""What guards and shortens a handoff, on real vLLM: checksums, encryption on the wire, and turns of a conversation.

One pair for all three: P has its cache in shared memory, where a test can write, and its KV crosses TCP.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbaton.protocol.ids import TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from tests.vllm.cache_memory import NOISE, overwrite_cache
from tests.vllm.duo import MODES, TOKENS, Duo, ends, prompt_of, running_duo, same
from tests.vllm.engines import IN_THE_CORE, Engine, post, until

pytestmark = pytest.mark.timeout(900)

WHILE_ENV = "KVBATON_TEST_CORRUPT_WHILE"  # as tests/vllm/corrupting_connector.py reads it
LEASE_S = 6.0
MARK = NOISE[:64]
"""Of a cache that was written over: no other bytes on this machine are these."""


@pytest.fixture(scope="module")
def damaging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, a byte of each copy goes wrong, whichever side makes it."""
    return tmp_path_factory.mktemp("damaging") / "now"


@pytest.fixture(scope="module")
def duo(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, damaging: Path
) -> Iterator[Duo]:
    """P takes turns, which vLLM lets only an engine of both roles do; routers use it as a P."""

    def around(name: str, config: dict[str, Any]) -> dict[str, Any]:
        config = {**config, "kv_connector_module_path": "tests.vllm.corrupting_connector"}
        if name == "d0":
            return config
        own = {**config["kv_connector_extra_config"], "role": "prefill"}
        return {**config, "kv_role": "kv_both", "kv_connector_extra_config": own}

    p = {"transport": "shm,tcp", "checksum": "full", "lease_s": LEASE_S}
    d = {"transport": "tcp", "checksum": "full", "encrypt": "on", "turn_s": 60.0}
    with running_duo(
        vllm_python, tiny("llama"), tmp_path_factory.mktemp("guards"),
        p_extra=p, d_extra=d, p_args=IN_THE_CORE, around=around,
        env={WHILE_ENV: str(damaging)},
    ) as duo:  # fmt: skip
        yield duo


def alone(duo: Duo, prompt: list[int]) -> Any:
    return duo.d.ask(prompt, TOKENS, cache_salt="alone")


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_copy_is_found_by_its_checksum_and_computed(duo: Duo, damaging: Path, mode: str) -> None:
    prompts = [prompt_of(length, f"damaged {mode}") for length in (200, 300, 500)]
    before = ends(duo.d)
    damaging.touch()
    try:
        answers = [duo.ask(prompt, mode) for prompt in prompts]
    finally:
        damaging.unlink()
    assert all(same(answer, alone(duo, prompt)) for answer, prompt in zip(answers, prompts, strict=True))
    until(lambda: ends(duo.d).get("checksum_mismatch", 0) - before.get("checksum_mismatch", 0) == len(prompts), 10,
          "every copy was found wrong")  # fmt: skip
    prompt, delivered = prompt_of(310, f"whole {mode}"), duo.delivered()
    assert same(duo.ask(prompt, mode), alone(duo, prompt))
    duo.handed_over(delivered, 1, "and again right, and handed over")


def test_the_next_turn_s_p_takes_from_d_what_it_need_not_compute(duo: Duo) -> None:
    """By the tickets that a router would mint: what D computed as the answer is KV that P lacks."""

    def ticket(target: str = "") -> str:
        content = Ticket(handoff, WorkerId("d0"), time.time() + 60.0, target=WorkerId(target))
        return seal(content, duo.keyring.ticket_keys[0])

    handoff, first = handoff_id(TransferId(secrets.token_hex(16))), prompt_of(300, "first turn")
    body = {"model": "tiny", "prompt": first, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    params = {**duo.prefill(first), "keep": ticket()}
    told = post(f"{duo.d.url}/v1/completions", {**body, "return_token_ids": True, "kv_transfer_params": params})
    said = [*first, *told["choices"][0]["token_ids"]]
    assert len(said) == 500
    goes_on, before = [*said, *prompt_of(100, "second turn")], turns_taken(duo.p)
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "turn": {"ticket": ticket("p0"), "tokens": len(said)},
    }
    params = duo.p.ask(goes_on, 1, kv_transfer_params=asked).kv_transfer_params
    assert params is not None
    assert same(duo.decode(goes_on, params), alone(duo, goes_on))
    until(lambda: turns_taken(duo.p) - before == 1, 10, f"P took the turn: {turns_taken(duo.p)}")


def turns_taken(engine: Engine) -> float:
    """How many turns this P has loaded; it tells with one of its steps."""
    name = "kvbaton_turn_loads_total{"
    return sum(value for each, value in engine.metrics().items() if each.startswith(name) and '"taken"' in each)


def test_a_step_that_takes_longer_than_a_lease_costs_no_handoff(duo: Duo) -> None:
    """Forty answers on a busy machine: D's first step took 15 s, and 7 leases ended while their requests lay in vLLM's
    queue. Here D's worker is stopped in a step; D claims what comes meanwhile, and P keeps it."""
    prompts = [prompt_of(200 + number, "long step") for number in range(5)]
    before = ends(duo.d)
    held = duo.prefill(prompts[0])
    worker = max(pid for pid in duo.d.pids() if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes())
    with ThreadPoolExecutor(len(prompts)) as pool:
        os.kill(worker, signal.SIGSTOP)
        try:
            answers = [pool.submit(duo.decode, prompts[0], held)]
            time.sleep(1.0)  # its step has begun
            answers += [pool.submit(duo.decode, prompt, duo.prefill(prompt)) for prompt in prompts[1:]]
            time.sleep(LEASE_S + 4.0)
        finally:
            os.kill(worker, signal.SIGCONT)
        found = [answer.result(60) for answer in answers]
    assert all(same(answer, alone(duo, prompt)) for answer, prompt in zip(found, prompts, strict=True))
    now = {name: count - before.get(name, 0) for name, count in ends(duo.d).items() if count != before.get(name, 0)}
    assert now == {"delivered": len(prompts)}, now


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], int]]:
    """Everything that crosses loopback; says how often the mark was in it."""
    found, stop = [0], threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as packets:
        packets.bind(("lo", 0))
        packets.settimeout(0.1)
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)

        def listen() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    found[0] += MARK in packets.recv(1 << 17)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield lambda: found[0]
        finally:
            stop.set()
            thread.join()


def test_zz_no_kv_is_on_the_wire_that_one_could_read(duo: Duo) -> None:
    """Last, since it ruins P's cache. D asks for encryption, P leaves it to the place: the stricter wins."""
    prompt = prompt_of(600, "on the wire")
    params, before = duo.prefill(prompt), duo.delivered()
    assert overwrite_cache(duo.p) > 0
    with listening() as marks:
        duo.decode(prompt, params)
        duo.handed_over(before, 1, "by a handoff, whose bytes were the mark's")
        assert marks() == 0
        one, other = socket.create_server(("127.0.0.1", 0)), socket.socket()
        with one, other:
            other.connect(one.getsockname())
            other.sendall(NOISE[:4096])
            until(lambda: marks() > 0, 10, "the same bytes are seen where nobody encrypts them")
