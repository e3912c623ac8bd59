"""Cases of P whose cache may be pinned by handoffs only in part: who waits, who is refused, and what is left of it."""

from __future__ import annotations

from typing import Any

from kvbaton.api.params import REFUSED_FOR_D
from kvbaton.engines.vllm.waiting import ASKED_MAX
from kvbaton.node.pin_budget import PinBudget
from kvbaton.node.prompt_account import PromptAccount
from kvbaton.protocol.geometry.layout import needed_blocks
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import Lab, d_params, demand, p_params, prompt_of, router_ticket

ONE = 0.001
"""A share that one prompt has to itself, whatever its size."""
SHAPES = {
    "one group": EngineShape(),
    "two groups": EngineShape(windows=(0, 8), blocks=121),
    "two ranks": EngineShape(ranks=2),
}
MANY = ASKED_MAX + 6
TOKENS = 20


def budget_of(engine: LabEngine) -> PinBudget:
    found: PinBudget = engine.connector._scheduler.presence.node.doorway.budget
    return found


def account_of(engine: LabEngine) -> PromptAccount:
    found: PromptAccount = engine.connector._scheduler.reporting.prompts
    return found


def is_refused(params: dict[str, Any] | None) -> bool:
    """Whether P says so; vLLM adds words of its own."""
    return params is not None and {**params, **REFUSED_FOR_D} == params


def leased(lab: Lab, seed: int) -> dict[str, Any]:
    """A prompt that P keeps for whoever comes, and that nobody reads yet."""
    return lab.prefill(prompt_of(TOKENS, seed))[1]


def taken(lab: Lab, seed: int, params: dict[str, Any]) -> None:
    d = lab.engines["d0"]
    name = d.add(prompt_of(TOKENS, seed), params)
    lab.ended(d, name)
    lab.right(d, name)


@case(shape=tuple(SHAPES))
def a_prompt_waits_until_another_has_been_read(lab: Lab, shape: str) -> None:
    p, _ = lab.duo(SHAPES[shape], pin_share=ONE, pin_wait_s=15.0)
    first = leased(lab, 1)
    second = p.add(prompt_of(TOKENS, 2), p_params("pull"), max_tokens=1)
    lab.run(20)
    demand(p.outcomes[second].reason is None, f"it ended as {p.outcomes[second].reason}")
    demand(budget_of(p).waiting == 1, f"{budget_of(p).waiting} wait")
    taken(lab, 1, first)
    lab.ended(p, second)
    params = p.outcomes[second].params
    demand(params is not None and params.get("ticket"), f"P gave {params}")
    assert params is not None
    taken(lab, 2, params)


@case(mode=MODES, shape=tuple(SHAPES))
def a_prompt_that_finds_no_room_in_time_is_refused_for_the_price_of_a_step(lab: Lab, mode: str, shape: str) -> None:
    p, d = lab.duo(SHAPES[shape], pin_share=ONE, pin_wait_s=0.3)
    first = leased(lab, 1)
    ticket = None if mode == "pull" else router_ticket()
    at_d = "" if ticket is None else d.add(prompt_of(TOKENS, 2), d_params(mode, ticket))
    second = p.add(prompt_of(TOKENS, 2), p_params(mode, ticket), max_tokens=1)
    lab.ended(p, second)
    told = p.outcomes[second].params
    demand(is_refused(told), f"P gave {told}")
    computed = p.runners[0].computed_of[second]
    demand(computed <= 1, f"{computed} tokens were computed")
    demand(budget_of(p).refused_total == 1, f"{budget_of(p).refused_total} were refused")
    at_d = at_d or d.add(prompt_of(TOKENS, 2), dict(told or {}))
    lab.ended(d, at_d)
    lab.right(d, at_d)
    if ticket is not None:
        lab.until(lambda: d.ends["pins_full"] == 1, "D to count how its handoff ended", 5.0)
    alone = account_of(d).figures()["alone_tokens_total"]
    reason = "prefill_full" if ticket is None else "pins_full"
    demand(alone == {reason: TOKENS - 1}, f"D's account says {alone}")
    taken(lab, 1, first)


@case(shape=tuple(SHAPES))
def many_that_wait_have_their_turn_one_after_the_other(lab: Lab, shape: str) -> None:
    """Also those that are put aside, and never is more pinned than one prompt."""
    p, d = lab.duo(SHAPES[shape], pin_share=ONE, pin_wait_s=30.0)
    asked = [p.add(prompt_of(TOKENS, seed), p_params("pull"), max_tokens=1) for seed in range(MANY)]
    most = len(SHAPES[shape].windows) * needed_blocks(TOKENS, SHAPES[shape].block_tokens)
    answers: dict[int, str] = {}

    def goes_on() -> bool:
        for seed, name in enumerate(asked):
            params = p.outcomes[name].params
            if p.outcomes[name].reason and seed not in answers:
                demand(params is not None and params.get("ticket"), f"{name} got {params}")
                answers[seed] = d.add(prompt_of(TOKENS, seed), dict(params or {}))
        pinned = budget_of(p).pinned_blocks
        demand(pinned <= most, f"{pinned} blocks are pinned, one prompt has at most {most}")
        return len(answers) == MANY and all(d.outcomes[name].reason for name in answers.values())

    lab.until(goes_on, "all to have been answered", 60.0)
    for name in answers.values():
        lab.right(d, name)


@case(mid_step=(False, True))
def an_abort_while_it_waits_for_room_leaves_nothing(lab: Lab, mid_step: bool) -> None:
    p, _ = lab.duo(EngineShape(), pin_share=ONE, pin_wait_s=15.0)
    first = leased(lab, 1)
    names = [p.add(prompt_of(TOKENS, seed), p_params("pull"), max_tokens=1) for seed in range(2, 2 + MANY)]
    lab.run(8)
    for name in names:
        p.abort(name, mid_step=mid_step)
    lab.until(lambda: budget_of(p).waiting == 0, "nobody to wait any more", 5.0)
    taken(lab, 1, first)
    demand(budget_of(p).promised_blocks == 0, "room is kept for requests that are over")


@case()
def leases_that_nobody_reads_pin_no_more_than_the_share(lab: Lab) -> None:
    """As where a D claims and never ends: P goes on, with the rest of its cache, and all is over with the leases."""
    p, d = lab.duo(EngineShape(), pin_share=0.4, pin_wait_s=0.2, lease_s=1.0)
    names = [p.add(prompt_of(TOKENS, seed), p_params("pull"), max_tokens=1) for seed in range(12)]
    limit = budget_of(p).blocks_max
    demand(limit == int(p.shape.usable_blocks * 0.4), f"the limit is {limit}")

    def all_over() -> bool:
        pinned = budget_of(p).pinned_blocks
        demand(pinned <= limit, f"{pinned} blocks are pinned, at most {limit}")
        return all(p.outcomes[name].reason for name in names)

    lab.until(all_over, "all to have ended")
    refused = [name for name in names if is_refused(p.outcomes[name].params)]
    demand(refused and len(refused) < len(names), f"{len(refused)} of {len(names)} were refused")
    plain = d.add(prompt_of(TOKENS, 50))
    lab.ended(d, plain)
    lab.right(d, plain)
