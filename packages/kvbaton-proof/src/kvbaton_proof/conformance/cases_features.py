"""Cases of features beside a handoff: drafters, pipelines, other connectors, weights that are replaced, images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.engines.vllm.content import request_content
from kvbaton.protocol.effects import Report
from kvbaton_proof.conformance.case_registry import MODES, case
from kvbaton_proof.conformance.configs import STATE, EngineShape
from kvbaton_proof.conformance.conformance_engine import LabEngine
from kvbaton_proof.conformance.lab import Lab, d_params, demand, key_directory, p_params, prompt_of, router_ticket

LENGTHS = (3, 4, 5, 8, 9, 16, 17, 33, 41)
DRAFTED = {
    "one group": EngineShape(drafts=1, blocks=81),
    "a window": EngineShape(windows=(0, 8), drafts=1, blocks=121),
    "states": EngineShape(windows=(0, STATE, 0), drafts=1, blocks=121),
    "states, no prefix cache": EngineShape(windows=(0, STATE, 0), drafts=1, blocks=121, prefix_caching=False),
    "two stages": EngineShape(windows=(0, 0, 0), drafts=1, stages=2, blocks=81),
}
BESIDE = (("baton", "offloading"), ("offloading", "baton"))


@case(mode=MODES, shape=tuple(DRAFTED))
def a_drafters_kv_arrives_as_one_engine_computes_it(lab: Lab, mode: str, shape: str) -> None:
    """Of each position it hangs on the tokens after: what P could only guess is computed by D."""
    lab.duo(DRAFTED[shape])
    for length in LENGTHS:
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(mode=MODES, overlapped=(False,))
def drafters_that_look_further_ahead_leave_more_to_d(lab: Lab, mode: str) -> None:
    """Several modules of MTP: as many positions at the end of a prompt hang on tokens that P has only guessed."""
    p, d = lab.duo(EngineShape(drafts=3, blocks=81))
    for length in (5, 8, 9, 17, 41):
        handoff = lab.hand_over(mode, prompt_of(length))
        lab.finish(handoff, loads=1)
        loaded, computed = d.watch.loaded_tokens[handoff.at_d], p.runners[0].computed_of[handoff.at_p]
        demand(loaded == length - 3, f"of {length} tokens D loaded {loaded}")
        demand(computed == length, f"of {length} tokens P computed {computed}")


@case(mode=MODES)
def a_beginning_that_d_has_is_good_for_drafts_too(lab: Lab, mode: str) -> None:
    """vLLM takes one block less of its own cache, since a drafter's KV at its end hangs on what comes after it."""
    _, d = lab.duo(DRAFTED["one group"])
    beginning = prompt_of(24)
    lab.finish(lab.hand_over(mode, beginning), loads=1)
    other = lab.hand_over(mode, [*beginning[:20], *prompt_of(14, 1)])
    lab.finish(other, loads=1)
    demand(d.watch.loaded_tokens[other.at_d] == 34 - 16, f"D loaded {d.watch.loaded_tokens[other.at_d]} tokens")


@case(drafts=((0, 1), (1, 0)), overlapped=(False,))
def a_drafter_on_one_side_alone_is_refused_by_name(lab: Lab, drafts: tuple[int, int]) -> None:
    """D computes the prompt, and with it what its drafter needs."""
    p, d = lab.duo(*(EngineShape(drafts=each, blocks=81) for each in drafts), lease_s=1.0)
    handoff = lab.hand_over("pull", prompt_of(20))
    lab.finish(handoff)
    demand(d.runners[0].computed_of[handoff.at_d] >= 20, "D took over a prompt without its drafter's KV")
    lab.until(lambda: d.ends["incompatible"], f"the reason to be counted, of {dict(d.ends)}")
    lab.until(lambda: p.blocks_left == 0, "P to let go")


@case()
def what_a_store_has_is_good_for_drafts_too(lab: Lab) -> None:
    """Two prompts that part at a block's end: the block before it is loaded from the store by none but the first."""
    p, d = lab.sharing(DRAFTED["one group"])
    beginning = prompt_of(16)
    first = p.add([*beginning, *prompt_of(9, 1)])
    lab.ended(p, first)
    lab.until(lambda: p.counts["store_puts_total"] or not p.has_work, "P to have put it")
    lab.settle()
    other = d.add([*beginning, *prompt_of(9, 2)])
    lab.answered(d, other)
    demand(d.watch.loaded_tokens[other] == 12, f"D loaded {d.watch.loaded_tokens[other]} tokens, not 12")


@case(mode=MODES, stages=((2, 1), (1, 2), (3, 2), (2, 2)), ranks=((1, 1), (2, 1)))
def stages_differ_between_p_and_d(lab: Lab, mode: str, stages: tuple[int, int], ranks: tuple[int, int]) -> None:
    several = EngineShape(windows=(0, 0, 0, 0), blocks=81)
    lab.duo(
        *(msgspec.structs.replace(several, stages=depth, ranks=wide) for depth, wide in zip(stages, ranks, strict=True))
    )
    for length in (1, 4, 5, 17, 40):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(mode=MODES, stages=((2, 1), (1, 2), (2, 2)))
def stages_of_models_with_windows_and_states(lab: Lab, mode: str, stages: tuple[int, int]) -> None:
    for windows in ((0, 8, 0, 8), (0, STATE, 0, STATE)):
        lab.duo(*(EngineShape(windows=windows, blocks=121, stages=each) for each in stages))
        for length in (3, 17, 33):
            lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)
        lab.settle()


@case(mode=MODES, beside=BESIDE)
def another_connector_beside_ours_changes_no_answer(lab: Lab, mode: str, beside: tuple[str, ...]) -> None:
    """vLLM's MultiConnector asks both, in their order; whoever has the prompt first loads it, the other lets go."""
    p, d = lab.duo(EngineShape(beside=beside, blocks=81))
    for length in (1, 4, 5, 17, 40):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)
    lab.settle()
    lab.until(lambda: d.ends["delivered"] == 5, f"five handoffs to be counted, of {dict(d.ends)}")
    for engine in (p, d):  # its own cache is lost: what it had comes back from where it was offloaded to
        engine.scheduler.kv_cache_manager.reset_prefix_cache()
    again = d.add(prompt_of(40))
    lab.answered(d, again)
    demand(d.watch.loaded_tokens[again] >= 32, f"{d.watch.loaded_tokens[again]} tokens came from the other connector")


@case(mode=MODES, beside=BESIDE)
def a_prompt_that_the_other_connector_has_frees_p(lab: Lab, mode: str, beside: tuple[str, ...]) -> None:
    """Both could load it. In whichever place ours is, P's blocks come back and the answer is right."""
    p, d = lab.duo(EngineShape(beside=beside, blocks=81))
    prompt = prompt_of(40)
    lab.finish(lab.hand_over(mode, prompt), loads=1)
    lab.settle()
    d.scheduler.kv_cache_manager.reset_prefix_cache()
    lab.finish(lab.hand_over(mode, prompt), loads=1)
    lab.until(lambda: p.blocks_left == 0, "P to let go")


@case(mode=MODES, beside=BESIDE)
def a_failed_handoff_beside_another_connector_is_computed(lab: Lab, mode: str, beside: tuple[str, ...]) -> None:
    _, d = lab.duo(EngineShape(beside=beside, blocks=81), claim_timeout=0.5, defer_timeout=0.5)
    lab.finish(lab.hand_over(mode, prompt_of(9)), loads=1)
    handoff = lab.prefill(prompt_of(30))[1]
    lab.stop("p0")
    at_d = d.add(prompt_of(30), handoff)
    lab.answered(d, at_d)


@case(mode=MODES)
def two_engines_of_both_roles_hand_over_to_each_other(lab: Lab, mode: str) -> None:
    """`kv_both`, and both ways at once."""
    lab.duo()
    there = [lab.hand_over(mode, prompt_of(20 + seed, seed)) for seed in range(3)]
    lab.engines["p0"], lab.engines["d0"] = lab.engines["d0"], lab.engines["p0"]
    try:
        back = [lab.hand_over("pull", prompt_of(30 + seed, seed)) for seed in range(3)]
        for each in back:
            lab.finish(each, loads=1)
    finally:
        lab.engines["p0"], lab.engines["d0"] = lab.engines["d0"], lab.engines["p0"]
    for each in there:
        lab.finish(each, loads=1)


@case(mode=MODES, caching=((True, False), (False, True), (False, False)))
def either_side_may_do_without_a_prefix_cache(lab: Lab, mode: str, caching: tuple[bool, bool]) -> None:
    lab.duo(*(EngineShape(prefix_caching=each) for each in caching))
    for seed, length in enumerate((4, 17, 30, 30)):
        lab.finish(lab.hand_over(mode, prompt_of(length, seed // 3)), loads=1)


# --- what else shapes the KV of a prompt


def hand_over(lab: Lab, mode: str, prompt: list[int], of_p: dict[str, Any], of_d: dict[str, Any]) -> tuple[str, str]:
    """A handoff whose requests differ in more than their tokens; its names at P and at D, which has answered."""
    p, d, ticket = lab.engines["p0"], lab.engines["d0"], router_ticket(ttl_s=5.0)
    at_p = p.add(prompt, p_params(mode) if mode == "pull" else p_params(mode, ticket), max_tokens=1, **of_p)
    lab.until(lambda: p.outcomes[at_p].reason, "P's answer")
    at_d = d.add(prompt, p.outcomes[at_p].params if mode == "pull" else d_params(mode, ticket), **of_d)
    lab.answered(d, at_d)
    return at_p, at_d


def taken_over(lab: Lab, mode: str, prompt: list[int], of_p: dict[str, Any], of_d: dict[str, Any]) -> bool:
    d = lab.engines["d0"]
    _, at_d = hand_over(lab, mode, prompt, of_p, of_d)
    return d.runners[0].computed_of[at_d] < len(prompt)


def adapter(name: str, number: int, content: bytes) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    place = Path(key_directory()).parent / f"adapter-{name}-{number}"
    place.mkdir(exist_ok=True)
    (place / "adapter_model.safetensors").write_bytes(content)
    return {"lora_request": LoRARequest(lora_name="poet", lora_int_id=number, lora_path=str(place))}


@case(mode=MODES)
def an_adapter_is_known_by_its_content(lab: Lab, mode: str) -> None:
    """LoRA: the same one under another number and path is handed over; another one of the same name is not."""
    lab.duo(EngineShape(blocks=81), lease_s=1.0, claim_timeout=0.7, defer_timeout=0.7)
    mine, same, other = adapter("p", 1, b"verses"), adapter("d", 2, b"verses"), adapter("d", 3, b"prose!")
    demand(taken_over(lab, mode, prompt_of(20, 1), mine, same), "the same adapter was not taken over")
    demand(not taken_over(lab, mode, prompt_of(20, 2), mine, other), "another adapter's KV was taken over")
    demand(not taken_over(lab, mode, prompt_of(20, 3), mine, {}), "an adapter's KV was taken over without it")


def image(name: str, first: int = 4, length: int = 6) -> dict[str, Any]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=first, length=length)
    feature = MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)
    return {"mm_features": [feature]}


def sees(engine: LabEngine) -> list[dict[str, Any]]:
    """Let an engine's scheduler take images; what it has encoders compute."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler, told = engine.scheduler, list[dict[str, Any]]()
    scheduler.max_num_encoder_input_tokens = 64
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    genuine = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = genuine(*args, **kwargs)
        told.append(dict(scheduled.scheduled_encoder_inputs))
        return scheduled

    scheduler.schedule = schedule
    return told


@case(mode=MODES)
def an_image_is_known_by_its_content_and_its_encoder_runs_once(lab: Lab, mode: str) -> None:
    """The encoder's output is not handed over: D needs none for positions that it has KV of."""
    p, d = lab.duo(EngineShape(blocks=81), lease_s=1.0, claim_timeout=0.7, defer_timeout=0.7)
    at_p, at_d = sees(p), sees(d)
    demand(taken_over(lab, mode, prompt_of(20, 1), image("a cat"), image("a cat")), "the same image was not taken over")
    demand(any(at_p) and not any(at_d), f"encoders ran on P {at_p} and on D {at_d}")
    demand(not taken_over(lab, mode, prompt_of(20, 2), image("a cat"), image("a dog")), "another image was taken over")
    demand(any(at_d), "D did not look at its own image")


@case(mode=MODES)
def a_cache_of_8_bits_is_handed_over_as_it_is(lab: Lab, mode: str) -> None:
    lab.duo(EngineShape(kv_dtype="fp8", blocks=81))
    for length in (1, 4, 5, 17, 40):
        lab.finish(lab.hand_over(mode, prompt_of(length)), loads=1)


@case(kinds=(("fp8", "auto"), ("auto", "fp8")), overlapped=(False,))
def another_kv_dtype_is_refused_by_name(lab: Lab, kinds: tuple[str, str]) -> None:
    p, d = lab.duo(*(EngineShape(kv_dtype=each, blocks=81) for each in kinds), lease_s=1.0)
    handoff = lab.hand_over("pull", prompt_of(20))
    lab.finish(handoff)
    lab.until(lambda: d.ends["incompatible"], f"the reason to be counted, of {dict(d.ends)}")
    lab.until(lambda: p.blocks_left == 0, "P to let go")


# --- weights


def weights_of(engine: LabEngine) -> Any:
    return engine.connector.scheduler._spoilt.weights


@case(mode=MODES)
def nothing_of_before_a_reload_is_handed_over(lab: Lab, mode: str) -> None:
    """P's weights are replaced, later D's: they share KV again when both have the same."""
    p, d = lab.duo(EngineShape(blocks=81), lease_s=1.0, claim_timeout=0.7, defer_timeout=0.7)
    prompt = prompt_of(30)
    lab.finish(lab.hand_over(mode, prompt), loads=1)
    lab.settle()
    weights_of(p).begin("files a")
    demand(not taken_over(lab, mode, prompt_of(31), {}, {}), "D took over what other weights have computed")
    weights_of(d).begin("files b")
    demand(not taken_over(lab, mode, prompt_of(32), {}, {}), "D took over what other weights have computed")
    weights_of(d).begin("files a")
    at_p, at_d = hand_over(lab, mode, prompt, {}, {})
    demand(p.runners[0].computed_of[at_p] == 30, "P found KV of the old weights in its cache")
    demand(d.watch.loaded_tokens[at_d] == 30, f"D loaded {d.watch.loaded_tokens[at_d]} tokens, not all")


@case(mode=MODES, whose=("p0", "d0"))
def a_reload_while_a_prompt_is_on_its_way_delivers_nothing_old(lab: Lab, mode: str, whose: str) -> None:
    p, d = lab.duo(EngineShape(blocks=81), lease_s=1.0)
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        weights_of(lab.engines[whose]).begin()
        tap.release()
        lab.finish(handoff)
    demand(d.runners[0].computed_of[handoff.at_d] >= 30, "D decoded on KV of other weights")
    demand(not d.ends["delivered"], f"it ended as {dict(d.ends)}")
    lab.until(lambda: p.blocks_left == 0, "P to let go")


@case(mode=MODES)
def a_reload_while_p_computes_ends_that_handoff(lab: Lab, mode: str) -> None:
    p, d = lab.duo(EngineShape(blocks=81, chunk_tokens=8), lease_s=1.0, claim_timeout=0.7, defer_timeout=0.7)
    ticket, prompt = router_ticket(ttl_s=5.0), prompt_of(40)
    at_p = p.add(prompt, p_params(mode) if mode == "pull" else p_params(mode, ticket), max_tokens=1)
    lab.until(lambda: p.runners[0].computed_of[at_p] >= 8, "P to have begun")
    weights_of(p).begin("files a")
    lab.until(lambda: p.outcomes[at_p].reason, "P's answer")
    given = p.outcomes[at_p].params or {}
    demand(mode != "pull" or not given.get("ticket"), f"P promised KV of two weights: {given}")
    at_d = d.add(prompt, given if mode == "pull" else d_params(mode, ticket))
    lab.answered(d, at_d)
    demand(d.runners[0].computed_of[at_d] >= 40, "D took over KV of two weights")


@case(mode=("stream", "push"))
def a_reload_before_p_has_begun_is_told_to_the_d_that_waits(lab: Lab, mode: str) -> None:
    """Nothing of it will be leased: without a word D would wait for as long as a P may take to begin."""
    p, d = lab.duo(EngineShape(blocks=81), lease_s=1.0, defer_timeout=60.0)
    ticket, prompt = router_ticket(ttl_s=30.0), prompt_of(40)
    at_d = d.add(prompt, d_params(mode, ticket))
    p.add(prompt, p_params(mode, ticket), max_tokens=1)
    weights_of(p).begin("files a")
    lab.ended(d, at_d, 10.0)
    lab.right(d, at_d)
    lab.until(lambda: d.ends["source_aborted"] == 1, f"D to say why; it says {dict(d.ends)}")


@contextlib.contextmanager
def unknown_content() -> Iterator[None]:
    """Whatever takes long to look at is not known yet."""
    genuine = request_content.is_known
    request_content.is_known = lambda request: not request_content.takes_long(request) and genuine(request)
    try:
        yield
    finally:
        request_content.is_known = genuine


@case(whose=("p0", "d0"))
def a_reload_while_an_adapter_is_looked_at_hands_nothing_over(lab: Lab, whose: str) -> None:
    """Its request came before the reload and is computed, or would be loaded, after it."""
    p, d = lab.duo(EngineShape(blocks=81), lease_s=1.0)
    poet, prompt, texts = adapter("both", 1, b"verses"), prompt_of(30), contextlib.nullcontext()
    with unknown_content() if whose == "p0" else texts:
        at_p = p.add(prompt, p_params("pull"), max_tokens=1, **poet)
        lab.run(5)
        if whose == "p0":
            weights_of(p).begin("files a")
    lab.until(lambda: p.outcomes[at_p].reason, "P's answer")
    with unknown_content() if whose == "d0" else texts:
        at_d = d.add(prompt, p.outcomes[at_p].params, **poet)
        lab.run(5)
        if whose == "d0":
            weights_of(d).begin("files a")
    lab.answered(d, at_d)
    demand(d.runners[0].computed_of[at_d] >= 30, "D decoded on KV of other weights")
    lab.until(lambda: p.blocks_left == 0, "P to let go")


@case(mode=MODES)
def a_reload_after_the_last_byte_delivers_nothing_old(lab: Lab, mode: str) -> None:
    """All of it is there, and vLLM has not been told: D would decode on it, and find it in its prefix cache."""
    _, d = lab.duo(EngineShape(blocks=81), lease_s=1.0)
    with lab.loading(mode, prompt_of(30)) as (tap, handoff):
        lab.run(20)  # P is done
        tap.release()
        door, until = d.connector.scheduler._live.door, time.monotonic() + 10.0
        while not any(isinstance(each, Report) for each in list(door._to_engine)):
            demand(time.monotonic() < until, "the load did not end")
            time.sleep(0.002)  # D takes no step
    weights_of(d).begin("files a")
    lab.finish(handoff)
    demand(d.runners[0].computed_of[handoff.at_d] >= 30, "D decoded on KV of other weights")
