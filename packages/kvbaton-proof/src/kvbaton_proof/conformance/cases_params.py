"""Cases of bad `kv_transfer_params`: whatever a client sends, the engine lives and that request alone pays."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from typing import Any

from kvbaton.control import keyring
from kvbaton.protocol.ids import HandoffId, WorkerId
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.lab import (
    Lab,
    d_params,
    demand,
    key_directory,
    p_params,
    prompt_of,
    router_ticket,
)


def _sealed(**fields: Any) -> str:
    """A ticket with a genuine signature and odd content."""
    content: dict[str, Any] = {
        "handoff": HandoffId(secrets.token_hex(16) + ".0"),
        "source": WorkerId("p0"),
        "expires_unix_s": time.time() + 60,
        **fields,
    }
    return seal(Ticket(**content), keyring.load(key_directory(), "router").ticket_keys[0])


STRANGE: dict[str, Callable[[], Any]] = {
    "an empty object": dict,
    "a list": lambda: [1, 2],
    "an empty list": list,
    "text": lambda: "do_remote_prefill",
    "a number": lambda: 7,
    "true": lambda: True,
    "nulls": lambda: dict.fromkeys(("do_remote_prefill", "do_remote_decode", "mode", "ticket")),
    "text for truth": lambda: {"do_remote_prefill": "true", "ticket": router_ticket()},
    "both ways": lambda: {"do_remote_prefill": True, "do_remote_decode": True, "ticket": router_ticket()},
    "an unknown mode": lambda: {"do_remote_prefill": True, "mode": "smoke", "ticket": router_ticket()},
    "numbers for keys": lambda: {1: 2, None: 3},
    "deep": lambda: {"do_remote_prefill": {"a": [[[[[]]]]]}},
    "nixl": lambda: {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "remote_request_id": "x",
    },
    "moriio": lambda: {"do_remote_prefill": True, "transfer_id": "tx-" + "0" * 32, "remote_dp_size": 1},
    "huge": lambda: {"do_remote_prefill": True, "mode": "pull", "ticket": "A" * 3_000_000},
    "huge fields": lambda: {"do_remote_prefill": True, "x" * 100_000: ["y"] * 100_000},
}
"""Parameters that ask for nothing that can be understood, or for what is not ours."""


def _bent() -> str:
    good = router_ticket()
    raw = base64.urlsafe_b64decode(good + "=" * (-len(good) % 4))
    return base64.urlsafe_b64encode(raw[:-1] + bytes([raw[-1] ^ 1])).decode().rstrip("=")


def _stranger() -> str:
    return seal(Ticket(HandoffId("0" * 32 + ".0"), WorkerId("p0"), time.time() + 60), secrets.token_bytes(32))


FORGED: dict[str, Callable[[], str]] = {
    "of nonsense": lambda: "nonsense",
    "empty": str,
    "not ascii": lambda: "ü☃" * 20,
    "with one bit changed": _bent,
    "cut short": lambda: router_ticket()[:60],
    "of another cluster": _stranger,
    "expired": lambda: router_ticket(ttl_s=-5),
    "for another D": lambda: router_ticket(target="d1"),
    "of an unknown P": lambda: _sealed(source=WorkerId("nobody")),
    "of D itself": lambda: _sealed(source=WorkerId("d0")),
    "of an earlier life": lambda: _sealed(incarnation=12345, lease=1, digest=b"0" * 16),
    "of a lease never given": lambda: _sealed(lease=10**12),
    "with a negative lease": lambda: _sealed(lease=-1),
    "that lives for ever": lambda: _sealed(expires_unix_s=float("inf"), lease=99, incarnation=1),
    "that expires never": lambda: _sealed(expires_unix_s=float("nan")),
    "with a huge digest": lambda: _sealed(digest=b"x" * 300),
}
"""Tickets that nobody gave, or that are of no use here."""


@case(what=tuple(STRANGE), policy=("recompute", "fail"))
def strange_parameters_cost_their_own_request_alone(lab: Lab, what: str, policy: Any) -> None:
    p, d = lab.duo(EngineShape(), EngineShape(policy=policy))
    for engine in (p, d):
        name = engine.add(prompt_of(17), STRANGE[what]())
        if lab.ended(engine, name) != "error":
            lab.right(engine, name)
        else:
            demand(policy == "fail" or engine is d, "an error under recompute")
    lab.finish(lab.hand_over("pull", prompt_of(20, 3)), loads=1)


@case(what=tuple(FORGED), mode=MODES, policy=("recompute", "fail"))
def a_ticket_that_is_not_p_s_is_refused(lab: Lab, what: str, mode: str, policy: Any) -> None:
    _, d = lab.duo(EngineShape(), EngineShape(policy=policy), claim_timeout=0.5, defer_timeout=0.5)
    name = d.add(prompt_of(17), d_params(mode, FORGED[what]()))
    lab.until(lambda: d.outcomes[name].reason, "an end", 6.0)
    if policy == "recompute":
        lab.right(d, name)
    else:
        demand(d.outcomes[name].reason == "error", f"ended as {d.outcomes[name].reason}")
    demand(d.watch.received[name] == d.watch.failed[name], "it was honoured")


@case(what=tuple(FORGED), mode=("stream", "push"))
def p_computes_a_prompt_with_a_bad_ticket_all_the_same(lab: Lab, what: str, mode: str) -> None:
    p, _ = lab.duo(claim_timeout=0.5, defer_timeout=0.5, lease_s=0.5, max_hold_s=1.5)
    name = p.add(prompt_of(17), p_params(mode, FORGED[what]()), max_tokens=1)
    lab.until(lambda: p.outcomes[name].reason, "an end")
    lab.right(p, name)


@case()
def parameters_are_not_changed_for_the_client(lab: Lab) -> None:
    """The router may send the same object to several engines, or log it."""
    _, d = lab.duo()
    _, params = lab.prefill(prompt_of(20))
    before = dict(params)
    name = d.add(prompt_of(20), params)
    lab.until(lambda: d.outcomes[name].reason, "an end")
    demand(params == before, f"they were {before}, now {params}")


@case()
def p_answers_with_plain_json(lab: Lab) -> None:
    import json

    lab.duo()
    _, params = lab.prefill(prompt_of(20))
    demand(json.loads(json.dumps(params)) == params, f"not plain: {params}")
    demand(not any("port" in key or "host" in key or "block" in key for key in params), f"it says too much: {params}")
    lab.engines["d0"].add(prompt_of(20), json.loads(json.dumps(params)))
