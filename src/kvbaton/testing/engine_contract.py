"""The contract of an engine's adapter as a public suite: run it on your own.

    @pytest.mark.parametrize("case", check_engine.cases, ids=str)
    def test_my_adapter_keeps_the_contract(case: EngineCase) -> None:
        case(EngineRig(MyEngine))

or `check_engine(MyEngine)` for all of it at once. Law: whatever happens, the answer is that of one engine, and
afterwards nothing is held. It is of pull, and in virtual time, so that leases run out at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvbaton.protocol.events import Departed
from kvbaton.protocol.ids import RequestId
from kvbaton.testing.engine_harness import EngineRig, Make

LEASE_S = 15.0
STEPS_TO_CLAIM = 20  # more than a request needs from its claim to its copy
PROMPTS: Sequence[Sequence[int]] = [
    tuple(range(seed, seed + length)) for seed, length in ((1, 1), (20, 7), (3, 16), (40, 19), (5, 33))
]
"""Of one token, of whole blocks and of others; most engines have blocks of 1 to 16 tokens."""

Check = Callable[[EngineRig], None]


class EngineCase(msgspec.Struct, frozen=True):
    """One law, as a sentence and a function. Whatever it was about, nothing may be held in the end."""

    run: Check

    def __str__(self) -> str:
        return self.run.__name__

    def __call__(self, rig: EngineRig) -> None:
        self.run(rig)
        rig.rest()


def the_answer_is_that_of_one_engine(rig: EngineRig) -> None:
    for number, prompt in enumerate(PROMPTS, 1):
        answer = rig.result(rig.d, rig.decoding(prompt, rig.prefilled(prompt)))
        assert answer == rig.alone(prompt)
        assert rig.d.counted("ends.delivered") == number, "it was computed, not handed over"


def many_at_once_each_get_their_own(rig: EngineRig) -> None:
    asked = [(prompt, rig.decoding(prompt, rig.prefilled(prompt))) for prompt in PROMPTS]
    for prompt, request in asked:
        assert rig.result(rig.d, request) == rig.alone(prompt)


def answers_differ_where_the_kv_does(rig: EngineRig) -> None:
    """Otherwise nothing here would show a wrong byte."""
    assert len({rig.alone(prompt) for prompt in PROMPTS}) == len(PROMPTS)


def a_ticket_that_leads_nowhere_costs_a_prefill_and_no_more(rig: EngineRig) -> None:
    first = PROMPTS[3]
    second = tuple(token + 50 for token in first)  # as long, so that only the content tells them apart
    of_first = rig.prefilled(first)
    for ticket in ("forged", of_first[:-2], of_first):  # the last is genuine, and of another prompt
        assert rig.result(rig.d, rig.decoding(second, ticket)) == rig.alone(second)
    assert rig.d.counted("ends.delivered") == 0


def a_ticket_is_good_once(rig: EngineRig) -> None:
    prompt = PROMPTS[2]
    ticket = rig.prefilled(prompt)
    for _ in range(2):
        assert rig.result(rig.d, rig.decoding(prompt, ticket)) == rig.alone(prompt)
    assert rig.d.counted("ends.delivered") == 1


def a_prompt_that_nobody_reads_is_kept_for_its_lease_and_no_longer(rig: EngineRig) -> None:
    rig.prefilled(PROMPTS[2])
    rig.later(1.0)
    free = rig.p.blocks - rig.p.engine.free_blocks()
    assert free >= rig.blocks_of(PROMPTS[2]), "what was leased is not pinned: it may be reused before D reads it"
    rig.later(LEASE_S + 1.0)
    assert not rig.p.held, "what nobody read is still held"


def a_request_that_is_aborted_after_any_step_leaves_nothing(rig: EngineRig) -> None:
    for steps in range(16):
        prompt = PROMPTS[steps % len(PROMPTS)]
        request = rig.decoding(prompt, rig.prefilled(prompt))
        for _ in range(steps):
            rig.step()
        rig.d.engine.abort(request)
    rig.rest()


def a_prefill_that_is_aborted_leaves_nothing(rig: EngineRig) -> None:
    request = rig.name()
    rig.p.engine.prefill(request, PROMPTS[4])
    rig.p.engine.abort(request)


def a_late_read_of_reused_blocks_never_counts(rig: EngineRig) -> None:
    """The wire is cut until P's lease is over and P has computed over what it leased; then D's copies arrive."""
    prompt = PROMPTS[3]
    request = _copying(rig, prompt)
    rig.wire.is_cut = True
    rig.later(LEASE_S + 1.0)
    _overwrite(rig)
    rig.wire.is_cut = rig.fabric.is_held = False
    assert rig.result(rig.d, request) == rig.alone(prompt), "it answered from what P had computed since"
    assert rig.d.counted("ends.delivered") == 0


def bytes_that_land_late_meet_no_other_request(rig: EngineRig) -> None:
    """A request is aborted in mid-copy; its bytes land when others have loaded into every block that they could get."""
    first = _copying(rig, PROMPTS[4])
    rig.d.engine.abort(first)
    rig.until("P's release", lambda: not rig.p.held)
    fitting = rig.p.blocks // rig.blocks_of(PROMPTS[4])
    prompts = [tuple(token + 100 * number for token in PROMPTS[4]) for number in range(1, fitting + 1)]
    others = [(prompt, rig.decoding(prompt, rig.prefilled(prompt))) for prompt in prompts]
    for _ in range(STEPS_TO_CLAIM):
        rig.step()
    assert any(rig.d.engine.doorway.holds(other) for _, other in others)
    rig.fabric.is_held, rig.fabric.is_late_held = False, True
    rig.step()
    rig.fabric.is_late_held = False
    for prompt, other in others:
        assert rig.result(rig.d, other) == rig.alone(prompt), "another request's bytes landed in its blocks"


def the_death_of_p_costs_a_prefill_and_no_more(rig: EngineRig) -> None:
    prompt = PROMPTS[3]
    request = _copying(rig, prompt)
    rig.d.node.tell(Departed(rig.p.peer.worker))
    rig.later(1.0)
    rig.fabric.is_held = False
    assert rig.result(rig.d, request) == rig.alone(prompt)


def _copying(rig: EngineRig, prompt: Sequence[int]) -> RequestId:
    """A request of D's whose copies are under way, and stay so until the fabric lets go."""
    ticket = rig.prefilled(prompt)
    rig.fabric.is_held = True
    request = rig.decoding(prompt, ticket)
    rig.until("blocks for the load", lambda: rig.d.engine.doorway.holds(request))
    rig.step()
    return request


def _overwrite(rig: EngineRig) -> None:
    """Have P compute until every block has been handed out again, twice over."""
    prompt = PROMPTS[4]
    for number in range(1, 2 * rig.p.blocks // rig.blocks_of(prompt) + 2):
        rig.result(rig.p, _computing(rig, tuple(token + 1000 * number for token in prompt)))


def _computing(rig: EngineRig, prompt: Sequence[int]) -> RequestId:
    request = rig.name()
    rig.p.engine.decode(request, prompt, "")
    return request


class EngineContract:
    """Callable on what makes an engine behind a door; `cases` to run them one by one."""

    cases: tuple[EngineCase, ...] = tuple(
        EngineCase(check)
        for check in (
            the_answer_is_that_of_one_engine,
            many_at_once_each_get_their_own,
            answers_differ_where_the_kv_does,
            a_ticket_that_leads_nowhere_costs_a_prefill_and_no_more,
            a_ticket_is_good_once,
            a_prompt_that_nobody_reads_is_kept_for_its_lease_and_no_longer,
            a_request_that_is_aborted_after_any_step_leaves_nothing,
            a_prefill_that_is_aborted_leaves_nothing,
            a_late_read_of_reused_blocks_never_counts,
            bytes_that_land_late_meet_no_other_request,
            the_death_of_p_costs_a_prefill_and_no_more,
        )
    )

    def __call__(self, make: Make, *, ranks: int = 1, groups: int = 1) -> None:
        """Run every case on a rig of its own; AssertionError names the law that is broken."""
        for case in self.cases:
            try:
                case(EngineRig(make, ranks=ranks, groups=groups))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


check_engine = EngineContract()
