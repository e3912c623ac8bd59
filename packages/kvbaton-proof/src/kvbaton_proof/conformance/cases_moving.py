"""Cases in which nothing goes wrong: every mode, length, group, rank and cache hit moves exactly what is needed.

Layers that keep a state have one at the end, of exactly the tokens that are handed over: the runner's states count
tokens, and one that has seen a token too many or too few, or is another rank's, is wrong.
"""

from __future__ import annotations

from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.wire.messages import Versions
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import REFERENCE, STATE, EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import (
    Lab,
    d_params,
    demand,
    landing_before_steps,
    leave_in_flight,
    p_params,
    prompt_of,
    reuse_all,
    router_ticket,
)

WINDOWED = EngineShape(windows=(0, 8), blocks=81)


@case(mode=MODES, transport=("tcp", "shm"))
def prompts_of_every_length_around_blocks_arrive_right(lab: Lab, mode: str, transport: str) -> None:
    lab.duo(transport=transport)
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 60):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(mode=MODES, d_first=(True, False))
def it_does_not_matter_which_side_is_told_first(lab: Lab, mode: str, d_first: bool) -> None:
    _, d = lab.duo()
    one = lab.hand_over(mode, prompt_of(30), p_first=not d_first)
    two = lab.hand_over(mode, prompt_of(17, 1), p_first=not d_first)
    lab.finish(two, loads=1)
    lab.finish(one, loads=1)
    demand(d.runners[0].computed_of[one.at_d] == 4, f"D computed {d.runners[0].computed_of[one.at_d]} positions, not 4")


@case(mode=MODES)
def a_stream_of_chunks_is_moved_as_it_grows(lab: Lab, mode: str) -> None:
    small = EngineShape(chunk_tokens=8, blocks=81)
    lab.duo(small)
    for seed in range(3):
        lab.finish(lab.hand_over(mode, prompt_of(90 + seed, seed)), loads=1)


@case(mode=MODES, length=(3, 5, 8, 9, 12, 13, 14, 15, 16, 31, 40))
def two_groups_with_a_window_arrive_right(lab: Lab, mode: str, length: int) -> None:
    lab.duo(WINDOWED)
    for seed in range(2):
        lab.finish(lab.hand_over(mode, prompt_of(length, seed)), loads=1)


@case(mode=MODES, chunk=(4, 6, 16, 64), window=(4, 5, 8))
def windows_and_chunks_of_any_size_fit_together(lab: Lab, mode: str, chunk: int, window: int) -> None:
    lab.duo(EngineShape(windows=(0, window, 0, window), blocks=81, chunk_tokens=max(chunk, 8)))
    for length in (6, 13, 27, 39):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(mode=MODES, ranks=((2, 1), (1, 2), (2, 2), (4, 2)), transport=("tcp", "shm"))
def ranks_differ_between_p_and_d(lab: Lab, mode: str, ranks: tuple[int, int], transport: str) -> None:
    _, d = lab.duo(EngineShape(ranks=ranks[0]), EngineShape(ranks=ranks[1]), transport=transport)
    names = []
    for length in (3, 16, 33):
        handoff = lab.hand_over(mode, prompt_of(length))
        lab.finish(handoff, loads=1)
        names.append(handoff.at_d)
    reports = {name: d.watch.received[name] for name in names}
    demand(set(reports.values()) == {1}, f"reports by request {reports}, expected one of each")
    left = d.aggregator._recv_remaining_count
    demand(not left, f"the aggregator still counts {left}")


@case(mode=MODES, layouts=(("LBHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("BLHNC", "BLHNC")))
def layouts_differ_between_p_and_d(lab: Lab, mode: str, layouts: tuple[str, str]) -> None:
    lab.duo(EngineShape(layout=layouts[0]), EngineShape(layout=layouts[1]))
    for length in (5, 16, 30):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(mode=MODES)
def only_what_d_lacks_is_moved(lab: Lab, mode: str) -> None:
    _, d = lab.duo()
    beginning = prompt_of(24)
    lab.finish(lab.hand_over(mode, beginning), loads=1)
    handoff = lab.hand_over(mode, [*beginning, *prompt_of(10, 1)])
    lab.finish(handoff, loads=1)
    moved = d.watch.loaded_tokens[handoff.at_d]
    demand(moved == 34 - 24, f"{moved} tokens were moved, 10 were missing")


@case(mode=MODES)
def a_prompt_that_d_has_already_is_not_moved(lab: Lab, mode: str) -> None:
    _, d = lab.duo()
    prompt = prompt_of(25)
    lab.finish(lab.hand_over(mode, prompt), loads=1)
    handoff = lab.hand_over(mode, prompt)
    lab.finish(handoff)
    moved = d.watch.loaded_tokens[handoff.at_d]
    demand(moved <= 1, f"{moved} tokens were moved, at most the last one was missing")


@case(mode=MODES)
def a_prefix_cached_on_p_is_handed_over_too(lab: Lab, mode: str) -> None:
    p, _ = lab.duo()
    beginning = prompt_of(24)
    alone = p.add(beginning, max_tokens=2)
    lab.until(lambda: p.outcomes[alone].reason, "P's own answer")
    handoff = lab.hand_over(mode, [*beginning, *prompt_of(9, 1)])
    lab.finish(handoff, loads=1)
    demand(p.runners[0].computed_of[handoff.at_p] <= 9, "P computed what it had")


@case(mode=MODES)
def the_first_token_may_be_the_last_one_on_p(lab: Lab, mode: str) -> None:
    """EOS sampled by P ends its request as stopped; the prompt is complete all the same."""
    p, d = lab.duo()
    prompt, ticket = prompt_of(19), router_ticket()
    params = p_params(mode) if mode == "pull" else p_params(mode, ticket)
    at_p = p.add(prompt, params, max_tokens=1, eos_first=True)
    lab.until(lambda: p.outcomes[at_p].reason, "P's end")
    demand(p.outcomes[at_p].tokens == [2], f"P answered {p.outcomes[at_p].tokens}")
    given = p.outcomes[at_p].params if mode == "pull" else d_params(mode, ticket)
    demand(given and given.get("ticket"), f"P gave nothing for D: {p.outcomes[at_p]}")
    at_d = d.add(prompt, given)
    lab.answered(d, at_d)
    demand(d.watch.loads[at_d] == 1, "D computed the prompt itself")


@case()
def a_p_that_goes_on_decoding_keeps_its_prompt_whole(lab: Lab) -> None:
    """A client may let P answer a few tokens: the handoff is of the prompt."""
    _, d = lab.duo()
    prompt = prompt_of(18)
    _, params = lab.prefill(prompt, max_tokens=5)
    at_d = d.add(prompt, params)
    lab.answered(d, at_d)
    demand(d.watch.loads[at_d] == 1, "D computed the prompt itself")


@case(mode=MODES, pipelined=((True, False), (False, True)), overlapped=(False,))
def steps_may_overlap_on_one_side_alone(lab: Lab, mode: str, pipelined: tuple[bool, bool]) -> None:
    """Asynchronous scheduling: a step is scheduled while the one before it has not run yet."""
    lab.duo(EngineShape(pipelined=pipelined[0], chunk_tokens=8), EngineShape(pipelined=pipelined[1]))
    some = [lab.hand_over(mode, prompt_of(20 + seed, seed)) for seed in range(3)]
    for each in some:
        lab.finish(each, loads=1)


@case(mode=MODES, overlapped=(True,))
def a_step_in_flight_never_writes_over_a_handoff(lab: Lab, mode: str) -> None:
    """A request is aborted while a step that computes it has not run yet; its blocks may not be loaded into before."""
    p, d = lab.duo(EngineShape(), EngineShape(blocks=25, role="kv_consumer", prefix_caching=False))
    prompt, ticket = prompt_of(32), router_ticket()
    if mode == "pull":
        _, params = lab.prefill(prompt)
    else:
        params = d_params(mode, ticket)
        at_p = p.add(prompt, p_params(mode, ticket), max_tokens=1)
        lab.until(lambda: p.outcomes[at_p].reason, "P to have computed the prompt")
    leave_in_flight(d)
    at_d = d.add(prompt, params)
    landing_before_steps(d, at_d, 8)
    lab.answered(d, at_d)
    demand(d.watch.loads[at_d] == 1 and not d.watch.failed[at_d], "nothing was loaded, so nothing was tried")


@case(mode=MODES)
def many_prompts_at_once_wait_for_their_blocks(lab: Lab, mode: str) -> None:
    """More than fits: everybody is served, nobody is served wrong."""
    small = EngineShape(blocks=25, seqs=4)
    lab.duo(EngineShape(blocks=61), small)
    some = [lab.hand_over(mode, prompt_of(20 + seed, seed), max_tokens=6) for seed in range(6)]
    for each in some:
        lab.finish(each)


@case(mode=MODES)
def a_request_that_must_compute_its_prompt_takes_nothing_over(lab: Lab, mode: str) -> None:
    """vLLM then asks for a match and discards the answer."""
    p, d = lab.duo(lease_s=1.0)
    prompt, ticket = prompt_of(22), router_ticket()
    if mode == "pull":
        params = lab.prefill(prompt)[1]
    else:
        p.add(prompt, p_params(mode, ticket), max_tokens=1)
        params = d_params(mode, ticket)
    at_d = d.add(prompt, params, computes_all=True)
    lab.answered(d, at_d)
    demand(not d.watch.loads[at_d], "it was loaded all the same")


@case(mode=MODES, old=("p0", "d0"))
def releases_of_two_versions_hand_over_to_each_other(lab: Lab, mode: str, old: str) -> None:
    """One of the two speaks version 1 alone, as its first release did: the pair settles on that."""
    _, d = lab.duo()
    ledger_of(lab.engines[old]).desk.identity.versions = Versions(1, 1)
    for length in (5, 30):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)
    spoken = {link.version for link in ledger_of(d).consumer.links.by_worker.values() if link.transport is not None}
    demand(spoken == {1}, f"D speaks {spoken} with P")


def ledger_of(engine: LabEngine) -> Ledger:
    found: Ledger = engine.connector.scheduler.presence.node.node.ledger
    return found


HYBRIDS = {
    "hybrid": EngineShape(windows=(0, STATE, STATE, 0), blocks=81),
    "hybrid without prefix cache": EngineShape(windows=(0, STATE, STATE, 0), blocks=81, prefix_caching=False),
    "states alone": EngineShape(windows=(STATE, STATE), blocks=81),
    "states and a window": EngineShape(windows=(STATE, 0, 8), blocks=121),
}
LENGTHS = (2, 3, 4, 5, 6, 8, 9, 13, 16, 17, 18, 32, 33, 41)


@case(mode=MODES, shape=tuple(HYBRIDS))
def a_state_is_handed_over_after_all_tokens_but_the_last(lab: Lab, mode: str, shape: str) -> None:
    p, d = lab.duo(HYBRIDS[shape])
    for length in LENGTHS:
        handoff = lab.hand_over(mode, prompt_of(length))
        lab.finish(handoff, loads=1)
        computed = p.runners[0].computed_of[handoff.at_p], d.runners[0].computed_of[handoff.at_d]
        demand(
            computed == (length - 1, 4), f"of {length} tokens P computed {computed[0]}, D with its answer {computed[1]}"
        )


@case(mode=MODES, ranks=(2,))
def each_rank_hands_its_slice_of_a_state_to_its_like(lab: Lab, mode: str, ranks: int) -> None:
    lab.duo(EngineShape(windows=(0, STATE), ranks=ranks, blocks=81))
    for length in (3, 16, 17, 33):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(mode=MODES, layouts=(("BLHNC", "BLHNC"), ("LBHNC", "BLHNC")))
def pages_of_states_may_lie_anywhere(lab: Lab, mode: str, layouts: tuple[str, str]) -> None:
    lab.duo(*(EngineShape(windows=(0, STATE, STATE, 0), blocks=81, layout=each) for each in layouts))
    for length in (3, 17, 30):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(ranks=((2, 1), (1, 2)), overlapped=(False,))
def a_state_is_not_cut_for_another_number_of_ranks(lab: Lab, ranks: tuple[int, int]) -> None:
    p, d = lab.duo(*(EngineShape(windows=(0, STATE), ranks=each, blocks=81) for each in ranks), lease_s=1.0)
    handoff = lab.hand_over("pull", prompt_of(20))
    lab.finish(handoff)
    computed = d.runners[0].computed_of[handoff.at_d]
    demand(computed >= 20, f"D computed {computed} tokens, ends {dict(d.ends)}, loaded {dict(d.watch.loaded_tokens)}")
    lab.until(lambda: d.ends["incompatible"], f"the reason to be counted, of {dict(d.ends)}")
    lab.until(lambda: p.blocks_left == 0, "P to let go")


@case(mode=MODES, caches=((True, False), (False, True)))
def one_side_may_keep_snapshots_and_the_other_not(lab: Lab, mode: str, caches: tuple[bool, bool]) -> None:
    lab.duo(*(EngineShape(windows=(0, STATE, 0), blocks=81, prefix_caching=each) for each in caches))
    for seed, length in enumerate((5, 16, 17, 30, 30)):
        lab.finish(lab.hand_over(mode, prompt_of(length, seed // 2)), loads=1)


@case(mode=MODES)
def a_hit_stands_on_a_snapshot_of_its_own_engine(lab: Lab, mode: str) -> None:
    """Both have the beginning, with a state at a block's end: P computes and D loads the rest, and one state.

    P's snapshot is a block earlier: it computed 24 tokens, the last of them to answer, and vLLM keeps none behind that.
    """
    p, d = lab.duo(HYBRIDS["hybrid"])
    beginning = prompt_of(25)  # 24 are handed over: a block's end, so that D has a snapshot of it
    lab.finish(lab.hand_over(mode, beginning), loads=1)
    handoff = lab.hand_over(mode, [*beginning[:24], *prompt_of(10, 1)])
    lab.finish(handoff, loads=1)
    demand(d.watch.loaded_tokens[handoff.at_d] == 9, f"D loaded {d.watch.loaded_tokens[handoff.at_d]} tokens, not 9")
    computed = p.runners[0].computed_of[handoff.at_p]
    demand(computed == 13, f"P computed {computed}, not 13")
    again = lab.hand_over(mode, beginning)
    lab.finish(again, loads=0)


@case(mode=MODES)
def a_stale_state_keeps_nothing(lab: Lab, mode: str) -> None:
    """P's blocks are reused while D copies: D computes the whole prompt, also where states are all there is."""
    for shape in ("hybrid", "states alone"):
        p, d = lab.duo(HYBRIDS[shape], lease_s=0.3, max_hold_s=0.6)
        with lab.loading(mode, prompt_of(30)) as (tap, handoff):
            lab.until(lambda: p.outcomes[handoff.at_p].reason, "P to have computed the prompt")  # noqa: B023
            lab.until(lambda: p.blocks_left == 0, "P's lease to end", 5.0)  # noqa: B023
            reuse_all(p)
            tap.release()
            lab.finish(handoff)
        demand(d.runners[0].computed_of[handoff.at_d] >= 30, "D kept a part of a prompt without its state")
        lab.settle()


@case(mode=MODES)
def a_prompt_of_one_token_is_computed_by_d(lab: Lab, mode: str) -> None:
    p, d = lab.duo(HYBRIDS["hybrid"], lease_s=1.0)
    ticket, prompt = router_ticket(), prompt_of(1)
    at_p = p.add(prompt, p_params(mode) if mode == "pull" else p_params(mode, ticket), max_tokens=1)
    lab.until(lambda: p.outcomes[at_p].reason, "P's answer")
    given = p.outcomes[at_p].params or {}
    demand(not given.get("ticket"), f"P promised a state after no token: {given}")
    at_d = d.add(prompt, given if mode == "pull" else d_params(mode, ticket))
    lab.answered(d, at_d)
    demand(not d.watch.loads[at_d], "D loaded a state after no token")


@case(mode=MODES)
def a_p_that_is_asked_for_more_ends_after_one_token(lab: Lab, mode: str) -> None:
    """A step more would count a token that is not handed over."""
    p, d = lab.duo(HYBRIDS["hybrid"])
    ticket, prompt = router_ticket(), prompt_of(22)
    at_p = p.add(prompt, p_params(mode) if mode == "pull" else p_params(mode, ticket), max_tokens=6)
    lab.until(lambda: p.outcomes[at_p].reason, "P's end")
    demand(len(p.outcomes[at_p].tokens) == 1, f"P answered {p.outcomes[at_p].tokens}")
    at_d = d.add(prompt, p.outcomes[at_p].params if mode == "pull" else d_params(mode, ticket))
    lab.answered(d, at_d)
    demand(d.watch.loads[at_d] == 1, "D computed the prompt itself")


@case(mode=MODES)
def a_p_that_wants_its_whole_prompt_hands_nothing_over(lab: Lab, mode: str) -> None:
    """Log probabilities of the prompt are of all its tokens: it is not shortened, and D computes it."""
    p, d = lab.duo(HYBRIDS["hybrid"], claim_timeout=0.5, defer_timeout=0.5)
    ticket, prompt = router_ticket(ttl_s=5.0), prompt_of(22)
    params = p_params(mode) if mode == "pull" else p_params(mode, ticket)
    at_p = p.add(prompt, params, max_tokens=1, computes_all=True)
    lab.until(lambda: p.outcomes[at_p].reason, "P's end")
    given = p.outcomes[at_p].params or {}
    demand(p.runners[0].computed_of[at_p] == 22 and not given.get("ticket"), f"{p.outcomes[at_p]}")
    at_d = d.add(prompt, given if mode == "pull" else d_params(mode, ticket))
    lab.answered(d, at_d)


@case(mode=MODES, chunk=(4, 8, 64))
def states_come_last_whatever_the_chunks(lab: Lab, mode: str, chunk: int) -> None:
    lab.duo(EngineShape(windows=(0, STATE, 0), blocks=121, chunk_tokens=max(chunk, 8)))
    some = [lab.hand_over(mode, prompt_of(40 + seed, seed)) for seed in range(3)]
    for each in some:
        lab.finish(each, loads=1)


@case(mode=MODES, shape=("reference", "latents"))
def other_kinds_of_windows_arrive_right(lab: Lab, mode: str, shape: str) -> None:
    """R-SWA hands over like full attention, a window over latents like any window."""
    reference = EngineShape(windows=(REFERENCE, REFERENCE), blocks=81)
    latents = EngineShape(windows=(0, 8), latent=True, blocks=81)
    lab.duo(reference if shape == "reference" else latents)
    for length in (3, 8, 15, 16, 31):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)
