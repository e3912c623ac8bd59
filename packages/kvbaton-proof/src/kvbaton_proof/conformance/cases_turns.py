"""Cases of conversations: D keeps what a request ended with, and the next turn's P takes it from there, or computes."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbaton.control import keyring
from kvbaton.protocol.ids import HandoffId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton_proof.conformance import stores
from kvbaton_proof.conformance.case_registry import case
from kvbaton_proof.conformance.cases_features import weights_of
from kvbaton_proof.conformance.cases_pressure import ONE, QUICK, called, is_refused
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import (
    BrokenLabError,
    Lab,
    d_params,
    demand,
    key_directory,
    p_params,
    prompt_of,
    router_ticket,
)

if TYPE_CHECKING:
    from kvbaton.engines.side.turns import TurnSide

ON: dict[str, Any] = {"turn_s": 30.0, "turn_percent": 60.0}
FIRST, ANSWER, MORE = 21, 10, 9
SHAPES = {"one rank": EngineShape(), "two ranks": EngineShape(ranks=2), "latents": EngineShape(latent=True, kv_heads=1)}


@dataclass
class LabTurn:
    """A turn that has ended at D: what the client knows of it, and what the router does."""

    said: list[int]  # prompt and answer
    handoff: HandoffId

    def goes_on(self, seed: int = 1) -> list[int]:
        return [*self.said, *prompt_of(MORE, seed)]

    def offer(self) -> dict[str, Any]:
        """What P is told."""
        return {"ticket": turn_ticket(self.handoff, "p0"), "tokens": len(self.said)}


def turn_ticket(handoff: HandoffId, target: str = "") -> str:
    """As the router mints them: for D to keep, and for P to take."""
    ticket = Ticket(handoff, WorkerId("d0"), time.time() + 60.0, target=WorkerId(target))
    return seal(ticket, keyring.load(key_directory(), "router").ticket_keys[0])


def turns_of(engine: LabEngine) -> TurnSide:
    found: TurnSide = engine.connector._scheduler._live.turns
    return found


def first_turn(lab: Lab, seed: int = 0) -> LabTurn:
    """A prompt is handed over and answered, and D may keep it."""
    d, prompt = lab.engines["d0"], prompt_of(FIRST, seed)
    _, params = lab.prefill(prompt)
    handoff = handoff_id(TransferId(secrets.token_hex(16)))
    at_d = d.add(prompt, {**params, "keep": turn_ticket(handoff)}, max_tokens=ANSWER)
    lab.answered(d, at_d)
    return LabTurn([*prompt, *d.outcomes[at_d].tokens], handoff)


def next_turn(lab: Lab, prompt: list[int], offer: dict[str, Any]) -> tuple[str, int]:
    """Both legs of the next turn, answered rightly: P's name of it, and how many tokens P computed."""
    p, d = lab.engines["p0"], lab.engines["d0"]
    at_p = p.add(prompt, {**p_params("pull"), "turn": offer}, max_tokens=1)
    lab.ended(p, at_p)
    params = p.outcomes[at_p].params
    demand(params is not None and params.get("ticket"), f"P gave {params}")
    at_d = d.add(prompt, dict(params or {}))
    lab.answered(d, at_d)
    return at_p, p.runners[0].computed_of[at_p]


def rest(lab: Lab) -> None:
    """Whatever is still kept is let go of, as by a D that drains."""
    d = lab.engines["d0"]
    turns_of(d).keeper.let_all_go()
    lab.until(lambda: d.blocks_left == 0, "D to have all its blocks", 5.0)


@case(shape=tuple(SHAPES), cold=(False, True))
def the_next_turns_p_takes_what_d_has_kept(lab: Lab, shape: str, cold: bool) -> None:
    p, _ = lab.duo(SHAPES[shape], **ON)
    turn = first_turn(lab)
    if cold:  # as another P would be
        lab.until(lambda: p.blocks_left == 0, "P's leases to be over", 5.0)
        demand(p.scheduler.reset_prefix_cache(), "P's cache could not be emptied")
    prompt = turn.goes_on()
    at_p, computed = next_turn(lab, prompt, turn.offer())
    demand(p.watch.loads[at_p] == 1, f"P loaded {p.watch.loads[at_p]} times: {turns_of(p).taker.loads}")
    demand(computed == len(prompt) - len(turn.said) + 1, f"P computed {computed} of {len(prompt)}")
    demand(turns_of(p).taker.loads["taken"] == 1, f"{turns_of(p).taker.loads}")
    rest(lab)


@case(mode=("stream", "push"))
def a_d_that_was_asked_at_once_waits_for_a_p_that_takes_a_turn(lab: Lab, mode: str) -> None:
    """P's prompt begins with a load; D reads behind what P computes, or is written to, from the load on."""
    p, d = lab.duo(EngineShape(chunk_tokens=8), **ON)
    turn = first_turn(lab)
    prompt, ticket = turn.goes_on(), router_ticket()
    lab.until(lambda: p.blocks_left == 0, "P's leases to be over", 5.0)
    p.scheduler.reset_prefix_cache()
    at_d = d.add(prompt, d_params(mode, ticket))
    at_p = p.add(prompt, {**p_params(mode, ticket), "turn": turn.offer()}, max_tokens=1)
    lab.answered(d, at_d)
    demand(p.watch.loads[at_p] == d.watch.loads[at_d] == 1, f"P took {turns_of(p).taker.loads}, D {dict(d.ends)}")
    rest(lab)


@case(why=("let go", "run out", "never kept"))
def a_turn_that_is_not_there_any_more_is_computed(lab: Lab, why: str) -> None:
    settings = {"let go": ON, "run out": {**ON, "turn_s": 0.3}, "never kept": {}}[why]
    p, d = lab.duo(**settings)
    turn = first_turn(lab)
    if why == "let go":
        rest(lab)
    lab.until(lambda: d.blocks_left == 0, "D to keep nothing", 5.0)
    at_p, _ = next_turn(lab, turn.goes_on(), turn.offer())
    demand(p.watch.loads[at_p] == 0, f"P loaded what D has not: {turns_of(p).taker.loads}")
    rest(lab)


@case()
def turns_go_where_requests_need_their_blocks(lab: Lab) -> None:
    _, d = lab.duo(**ON)
    first_turn(lab)
    demand(d.blocks_left > 0, "nothing was kept")
    large = d.add(prompt_of(130, 3), max_tokens=20)
    lab.answered(d, large)
    lab.until(lambda: d.blocks_left == 0, "the turn to have gone", 5.0)


@case()
def a_prompt_that_finds_no_room_to_be_pinned_takes_no_turn(lab: Lab) -> None:
    """It is cut to one token: what D has would not fit it, and vLLM would die of that."""
    p, d = lab.duo(pin_share=ONE, pin_wait_s=0.3, **ON)
    turn = first_turn(lab)
    held = lab.prefill(prompt_of(FIRST, 5))[1]
    at_p = p.add(turn.goes_on(), {**p_params("pull"), "turn": turn.offer()}, max_tokens=1)
    lab.ended(p, at_p)
    demand(is_refused(p.outcomes[at_p].params), f"P gave {p.outcomes[at_p].params}")
    demand(p.watch.loads[at_p] == 0, "P loaded for a request that it had refused")
    at_d = d.add(prompt_of(FIRST, 5), held)
    lab.answered(d, at_d)
    rest(lab)


@case()
def what_was_computed_with_two_weights_is_not_kept(lab: Lab) -> None:
    _, d = lab.duo(**ON)
    prompt = prompt_of(FIRST)
    _, params = lab.prefill(prompt)
    handoff = handoff_id(TransferId(secrets.token_hex(16)))
    at_d = d.add(prompt, {**params, "keep": turn_ticket(handoff)}, max_tokens=ANSWER)
    lab.until(lambda: len(d.outcomes[at_d].tokens) >= 2, "D to decode")
    weights_of(d).begin("files a")
    lab.ended(d, at_d)
    lab.until(lambda: d.blocks_left == 0, "D to keep nothing of it", 5.0)


@case(forced=(False, True))
def a_prefix_cache_is_emptied_although_a_turn_is_kept(lab: Lab, forced: bool) -> None:
    """vLLM empties it only while nobody holds a block, as before a pause: nobody was promised a turn."""
    p, d = lab.duo(**ON)
    turn = first_turn(lab)
    demand(d.blocks_left > 0, "nothing was kept")
    demand(d.scheduler.reset_prefix_cache(reset_running_requests=forced), "a turn kept the cache from being emptied")
    demand(d.blocks_left == 0, f"{d.blocks_left} blocks are held")
    at_p, _ = next_turn(lab, turn.goes_on(), turn.offer())
    demand(p.watch.loads[at_p] == 0, "P loaded what D has not")
    rest(lab)


PIECES = ("kvbaton.engines.side.turns", "kvbaton.node.turn_keeping")


@case(settles=False, piece=PIECES, call=(1, 2))
def a_failure_inside_costs_the_turn_alone(lab: Lab, piece: str, call: int) -> None:
    """Wherever keeping or taking fails: both turns are answered, vLLM sees nothing of it, and all blocks come back."""
    lab.duo(**ON, **QUICK)
    found, broken = called(piece, call, lambda: _two_turns(lab, 0)), []
    for seed, (owner, name) in enumerate(found, 1):
        what = _one(lab, owner, name, call, seed)
        if what:
            broken.append(f"{getattr(owner, '__name__', owner)}.{name}: {what}")
            lab.duo(**ON, **QUICK)
    if broken:
        raise BrokenLabError("\n    ".join([f"{len(broken)} of {len(found)} functions:", *broken]))


def _two_turns(lab: Lab, seed: int) -> None:
    turn = first_turn(lab, seed)
    p = lab.engines["p0"]
    lab.until(lambda: p.blocks_left == 0, "P's leases to be over", 5.0)
    p.scheduler.reset_prefix_cache()
    next_turn(lab, turn.goes_on(), turn.offer())


def _one(lab: Lab, owner: Any, name: str, call: int, seed: int) -> str:
    try:
        with stores.failing_once(owner, name, call):
            _two_turns(lab, seed)
        rest(lab)
        lab.settle(4.0)
        waits = [dict(turns_of(engine).taker._asked) for engine in lab.engines.values()]
        demand(not any(waits), f"turns are waited for that are over: {waits}")
    except Exception as error:  # noqa: BLE001 - it is what this case looks for
        return f"{type(error).__name__}: {str(error)[:500]}"
    return ""
