"""Cases of models whose layers keep a state: one state at the end, of exactly the tokens that are handed over.

The runner's states count tokens: one that has seen a token too many or too few, or is another rank's, is wrong.
"""

from __future__ import annotations

from kvbaton_proof.conformance import taps
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.cases_ending import LOADING
from kvbaton_proof.conformance.configs import REFERENCE, STATE, EngineShape
from kvbaton_proof.conformance.lab import Lab, d_params, demand, p_params, prompt_of, reuse_all, router_ticket

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
        with taps.copies() as tap:
            tap.hold()
            handoff = lab.hand_over(mode, prompt_of(30))
            lab.until(lambda: d.status(handoff.at_d) == LOADING, "D to load")  # noqa: B023
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
    lab.ended(d, at_d)
    lab.right(d, at_d)
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
    lab.ended(d, at_d)
    lab.right(d, at_d)
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
    lab.ended(d, at_d)
    lab.right(d, at_d)


@case(mode=MODES, chunk=(4, 8, 64))
def states_come_last_whatever_the_chunks(lab: Lab, mode: str, chunk: int) -> None:
    lab.duo(EngineShape(windows=(0, STATE, 0), blocks=121, chunk_tokens=max(chunk, 8)))
    some = [lab.hand_over(mode, prompt_of(40 + seed, seed)) for seed in range(3)]
    for each in some:
        lab.finish(each, loads=1)


@case(mode=MODES)
def many_hybrids_at_once_wait_for_their_blocks(lab: Lab, mode: str) -> None:
    small = EngineShape(windows=(0, STATE), blocks=31, seqs=4)
    lab.duo(EngineShape(windows=(0, STATE), blocks=81), small)
    some = [lab.hand_over(mode, prompt_of(20 + seed, seed), max_tokens=6) for seed in range(6)]
    for each in some:
        lab.finish(each)


@case(mode=MODES, shape=("reference", "latents"))
def other_kinds_of_windows_arrive_right(lab: Lab, mode: str, shape: str) -> None:
    """R-SWA hands over like full attention, a window over latents like any window."""
    reference = EngineShape(windows=(REFERENCE, REFERENCE), blocks=81)
    latents = EngineShape(windows=(0, 8), latent=True, blocks=81)
    lab.duo(reference if shape == "reference" else latents)
    for length in (3, 8, 15, 16, 31):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)
