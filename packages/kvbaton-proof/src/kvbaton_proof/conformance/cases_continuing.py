"""Cases in which an answer that another engine began goes on: what P computes, what D loads, what vLLM's scheduler
makes of it with either model runner, and that nothing goes on without the router's proof.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvbaton.control import keyring
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.ticket import seal_history
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EOS, STATE, VOCAB, EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.conformance_oracle import answer
from kvbaton_proof.conformance.lab import Lab, d_params, demand, key_directory, p_params, prompt_of, router_ticket

SHAPES: dict[str, EngineShape] = {
    "one group": EngineShape(blocks=81),
    "behind a window": EngineShape(blocks=81, windows=(0, 8)),
    "with states": EngineShape(blocks=81, windows=(0, STATE)),
}
AFTER = 30
MORE = 5
LENGTHS = (1, 2, 3, 4, 5, 8, 9)


def history(tokens: list[int], target: str, *, ttl_s: float = 60.0) -> dict[str, Any]:
    """As the router signs it, and as vLLM's front end passes it on."""
    key = keyring.load(key_directory(), "router").ticket_keys[0]
    proof = seal_history(tokens, WorkerId(target), time.time() + ttl_s, key)
    return {"tokens": tokens, "proof": proof, "repeated": True}


def said_after(prompt: list[int], count: int) -> list[int]:
    return answer(prompt, count)


def goes_on(lab: Lab, mode: str, prompt: list[int], said: list[int], *, more: int = MORE) -> tuple[str, str]:
    """Both are told what was said; returns the names there."""
    return hand_over(lab, mode, prompt, len(said) + more, said)


def hand_over(lab: Lab, mode: str, prompt: list[int], most: int, said: Sequence[int] = ()) -> tuple[str, str]:
    p, d, ticket = lab.engines["p0"], lab.engines["d0"], router_ticket()
    behind = {name: {"history": history(list(said), name)} if said else {} for name in ("p0", "d0")}
    at_p = p.add(prompt, {**p_params(mode, ticket), **behind["p0"]}, max_tokens=1)
    if mode == "pull":
        lab.ended(p, at_p)
        return at_p, d.add(prompt, {**(p.outcomes[at_p].params or {}), **behind["d0"]}, max_tokens=most)
    return at_p, d.add(prompt, {**d_params(mode, ticket), **behind["d0"]}, max_tokens=most)


def went_on(lab: Lab, engine: LabEngine, name: str, more: int = MORE) -> None:
    """What comes behind the history is what a single engine says, as much of it as is left."""
    lab.answered(engine, name)
    got = len(engine.outcomes[name].tokens)
    demand(got == more, f"{got} tokens behind the history, expected {more}")


@case(mode=MODES, shape=tuple(SHAPES))
def d_goes_on_behind_what_p_computes(lab: Lab, mode: str, shape: str) -> None:
    """P has all but the last token of the history, whose KV nobody has; D reads it and computes that token."""
    p, d = lab.duo(SHAPES[shape])
    for number, count in enumerate(LENGTHS):
        prompt = prompt_of(AFTER + number)
        at_p, at_d = goes_on(lab, mode, prompt, said_after(prompt, count))
        went_on(lab, d, at_d)
        demand(d.watch.loads[at_d] == 1, f"D loaded {d.watch.loads[at_d]} times: {dict(d.ends)}")
        handed, back = d.watch.loaded_tokens[at_d], 0 if shape == "one group" else 1
        demand(handed == len(prompt) + count - 1 - back, f"D loaded {handed} of {len(prompt)} + {count}")
        lab.ended(p, at_p)


@case(shape=tuple(SHAPES))
def d_alone_computes_prompt_and_history_anew(lab: Lab, shape: str) -> None:
    d = lab.engine("d0", SHAPES[shape])
    for number, count in enumerate(LENGTHS):
        prompt = prompt_of(AFTER + number)
        said = said_after(prompt, count)
        went_on(lab, d, d.add(prompt, {"history": history(said, "d0")}, max_tokens=count + MORE))


@case()
def what_d_has_of_prompt_and_history_is_not_computed_again(lab: Lab) -> None:
    """Its own cache has more than the prompt: vLLM asserts that of a request that was never preempted it has not."""
    d = lab.engine("d0", SHAPES["one group"])
    prompt = prompt_of(AFTER)
    lab.answered(d, d.add(prompt, max_tokens=20))
    said = said_after(prompt, 18)
    name = d.add(prompt, {"history": history(said, "d0")}, max_tokens=18 + MORE)
    went_on(lab, d, name)
    demand(d.runners[0].computed_of[name] <= 4 + MORE, f"D computed {d.runners[0].computed_of[name]} positions")


@case(runner=("v1", "v2"))
def copies_of_an_answer_are_loaded_by_who_goes_on(lab: Lab, runner: Any) -> None:
    """Nobody has to compute a whole block of what the dead engine had said; with runner V2 it is no prompt."""
    shape = EngineShape(blocks=81, runner=runner)
    p, d = lab.sharing(shape, shape, copies_percent=50)
    prompt, count = prompt_of(AFTER), 20
    lab.answered(p, p.add(prompt, max_tokens=count))
    whole = (len(prompt) + count - 1) // shape.block_tokens
    lab.until(lambda: lab.stores[-1].values >= whole, "the store to have the answer")
    name = d.add(prompt, {"history": history(said_after(prompt, count), "d0")}, max_tokens=count + MORE)
    went_on(lab, d, name)
    loaded, expected = d.watch.loaded_tokens[name], whole * shape.block_tokens
    demand(loaded == expected, f"{loaded} tokens were loaded, expected {expected}")


@case(mode=MODES, runner=("v1", "v2"))
def an_answer_goes_on_beside_one_that_is_copied(lab: Lab, mode: str, runner: Any) -> None:
    """Both are copied, and neither keeps the other waiting."""
    shape = EngineShape(blocks=81, runner=runner)
    _, d = lab.sharing(shape, shape, copies_percent=50)
    first, second = prompt_of(AFTER), prompt_of(AFTER + 7)
    _, at_first = hand_over(lab, mode, first, 40)
    lab.until(lambda: len(d.outcomes[at_first].tokens) > 12, "the first answer to be under way")
    _, at_second = goes_on(lab, mode, second, said_after(second, 20))
    lab.answered(d, at_first)
    went_on(lab, d, at_second)
    whole = (len(first) + 39) // shape.block_tokens + (len(second) + 20 + MORE - 1) // shape.block_tokens
    lab.until(lambda: lab.stores[-1].values >= whole, "the store to have both answers")


@case(mode=MODES)
def an_answer_behind_a_prompt_of_ps_is_copied(lab: Lab, mode: str) -> None:
    """D has not looked its prompt up: P had it."""
    p, d = lab.sharing(SHAPES["one group"], EngineShape(blocks=81), copies_percent=50)
    prompt, count = prompt_of(AFTER), 20
    at_p, at_d = hand_over(lab, mode, prompt, count)
    lab.answered(d, at_d)
    demand(d.watch.loads[at_d] == 1, f"D loaded {d.watch.loads[at_d]} times")
    whole = (len(prompt) + count - 1) // d.shape.block_tokens
    lab.until(lambda: lab.stores[-1].values >= whole, "the store to have the answer")
    lab.ended(p, at_p)


@case(mode=MODES)
def continued_requests_that_are_preempted_go_on_once_more(lab: Lab, mode: str) -> None:
    """D has no room for both: one of them is computed again, with what came behind its history."""
    _, d = lab.duo(SHAPES["one group"], EngineShape(blocks=17, prefix_caching=False))
    prompts = [prompt_of(16, number) for number in (1, 2)]
    names = [goes_on(lab, mode, prompt, said_after(prompt, 4), more=20)[1] for prompt in prompts]
    for name in names:
        went_on(lab, d, name, 20)
    demand(any(d.runners[0].computed_of[name] > 24 for name in names), "nobody was preempted")
    demand(max(d.watch.loads.values()) == 1, f"loads {d.watch.loads}")


@case(mode=MODES, policy=("recompute", "fail"))
def a_continued_load_that_fails_is_computed_or_fails_by_the_policy(lab: Lab, mode: str, policy: Any) -> None:
    """P is told another history than D: their KV is of other tokens, and D takes over nothing."""
    p, d = lab.duo(EngineShape(blocks=81, policy=policy), lease_s=1.0, claim_timeout=0.7, defer_timeout=0.7)
    prompt, ticket = prompt_of(AFTER), router_ticket(ttl_s=5.0)
    said = said_after(prompt, 6)
    at_p = p.add(prompt, {**p_params(mode, ticket), "history": history([*said[:5], 7, 7], "p0")}, max_tokens=1)
    lab.ended(p, at_p)
    given = (p.outcomes[at_p].params or {}) if mode == "pull" else d_params(mode, ticket)
    at_d = d.add(prompt, {**given, "history": history(said, "d0")}, max_tokens=6 + MORE)
    if policy == "fail":
        demand(lab.ended(d, at_d) == "error", f"it ended as {d.outcomes[at_d]}")
        demand(not d.outcomes[at_d].tokens, "D went on without the KV that it was promised")
    else:
        went_on(lab, d, at_d)
    demand(not d.ends["delivered"], f"D took over KV of another history: {dict(d.ends)}")
    lab.until(lambda: p.blocks_left == 0, "P to let go")


@case(mode=MODES, mid_step=(False, True))
def an_abort_of_a_continued_request_leaves_nothing(lab: Lab, mode: str, mid_step: bool) -> None:
    p, d = lab.duo(SHAPES["one group"], lease_s=1.0)
    prompt = prompt_of(AFTER)
    _, at_d = goes_on(lab, mode, prompt, said_after(prompt, 6))
    lab.until(lambda: d.status(at_d) != "WAITING", "D to have begun")
    d.abort(at_d, mid_step=mid_step)
    lab.until(lambda: p.blocks_left == 0, "P to let go")


REFUSED: dict[str, tuple[dict[str, Any], Reason]] = {
    "forged": ({"proof": "AAAA"}, Reason.TICKET_FORGED),
    "of other tokens": ({"tokens": [9, 9]}, Reason.TICKET_FORGED),
    "not repeated": ({"repeated": False}, Reason.BAD_MESSAGE),
    "empty": ({"tokens": []}, Reason.BAD_MESSAGE),
    "not numbers": ({"tokens": ["x"]}, Reason.BAD_MESSAGE),
}
SIGNED: dict[str, tuple[list[int], str, float, Reason]] = {
    "for p": ([5, 6], "p0", 60.0, Reason.TICKET_FORGED),
    "too late": ([5, 6], "d0", -1.0, Reason.TICKET_EXPIRED),
    "outside the vocabulary": ([5, VOCAB], "d0", 60.0, Reason.BAD_MESSAGE),
    "as long as the answer may be": ([5] * 20, "d0", 60.0, Reason.BAD_MESSAGE),
    "longer than the model": ([5] * 600, "d0", 60.0, Reason.BAD_MESSAGE),
    "with an end": ([5, EOS], "d0", 60.0, Reason.BAD_MESSAGE),
}


def refused(engine: LabEngine, told: dict[str, Any]) -> Reason:
    try:
        name = engine.add(prompt_of(20), {"history": told}, max_tokens=20)
    except ProtocolError as error:
        return error.reason
    demand(False, f"it was taken, as {name}")
    raise AssertionError


@case()
def a_history_without_the_routers_word_ends_its_request_before_the_scheduler_sees_it(lab: Lab) -> None:
    d = lab.engine("d0")
    good = history([5, 6], "d0")
    for what, (change, reason) in REFUSED.items():
        demand(refused(d, {**good, **change}) is reason, f"{what}: not {reason}")
    for what, (tokens, target, ttl_s, reason) in SIGNED.items():
        demand(refused(d, history(tokens, target, ttl_s=ttl_s)) is reason, f"{what}: not {reason}")
    demand(not d.scheduler.requests, "vLLM's scheduler has seen one of them")


@case()
def limits_count_the_history_with_either_runner(lab: Lab) -> None:
    """With runner V2 it is output. With V1 it is prompt: vLLM gets what is left of the limits."""
    lab.duo(SHAPES["one group"])
    prompt = prompt_of(AFTER)
    said = said_after(prompt, 6)
    for name, engine in lab.engines.items():
        at = engine.add(prompt, {"history": history(said, name)}, max_tokens=6 + MORE)
        request, is_output = engine.scheduler.requests[at], engine.shape.runner == "v2"
        demand(list(request.output_token_ids) == (said if is_output else []), f"output {request.output_token_ids}")
        demand(request.max_tokens == MORE + (6 if is_output else 0), f"{name}: max_tokens {request.max_tokens}")
        went_on(lab, engine, at)
