"""The embedded engine on a shared store: answers stay a single engine's, and nothing is left over, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvbaton.api.params import TransferParams
from kvbaton.engines.embedded.engine_request import EngineRequest, RequestStatus
from kvbaton.engines.side.stored_puts import Phase, StoredPrompt
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import RequestId, TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal
from kvbaton.ranks.engine_store import EngineStoreSettings
from kvbaton.store.memory_backend import MemoryBackend

from .helpers import answer_alone, prompt, request
from .store_rig import KEY, PATIENT, StoreRig, store_rig

Make = Callable[..., StoreRig]


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend(1 << 26)


@pytest.fixture
def make(memory: MemoryBackend) -> Iterator[Make]:
    made: list[StoreRig] = []

    def one(**changes: object) -> StoreRig:
        made.append(store_rig(memory, **changes))
        return made[-1]

    yield one
    for each in made:
        each.close()


def ask(rig: StoreRig, name: str, tokens: tuple[int, ...], answer: int = 6, **more: object) -> None:
    rig.engine.add_request(request(name, tokens, answer, **more))


def put(rig: StoreRig, tokens: tuple[int, ...], name: str = "put") -> None:
    """Have a prompt computed and in the store."""
    stored = rig.shelf.counters["puts.stored"]
    ask(rig, name, tokens, 1)
    rig.rest()
    assert rig.shelf.counters["puts.stored"] == stored + 1


def ticket() -> TransferParams:
    handoff = handoff_id(TransferId("1" * 32))
    return TransferParams(do_remote_prefill=True, ticket=seal(Ticket(handoff, WorkerId("p0"), 2000.0), KEY))


def handed(name: str, tokens: tuple[int, ...], answer: int = 6) -> EngineRequest:
    return request(name, tokens, answer, handoff=ticket())


# --- sharing


@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"tp": 4, "layout": "BL"}])
@pytest.mark.parametrize("length", [9, 33, 64, 100])
def test_what_one_engine_computed_another_loads(make: Make, shape: dict[str, object], length: int) -> None:
    p, d = make(**shape), make(**shape)
    tokens = prompt(length, length)
    put(p, tokens)
    ask(d, "a", tokens)
    d.rest()
    assert d.answer("a") == answer_alone(tokens, 6)
    assert d.cached("a") == (length - 1) // 8 * 8, "at least one token of the prompt is computed"
    assert d.stats()["store_hits_blocks_total"] == (length - 1) // 8
    assert d.stats()["store_errors_total"] == 0


def test_a_prompt_shorter_than_a_block_does_not_touch_the_store(make: Make) -> None:
    rig = make()
    ask(rig, "a", prompt(1, 7))
    rig.rest()
    assert rig.answer("a") == answer_alone(prompt(1, 7), 6)
    assert not rig.faulty.calls


def test_only_what_is_not_at_hand_is_loaded_and_the_rest_is_computed(make: Make) -> None:
    p, d = make(), make()
    shared = prompt(1, 80)
    put(p, shared[:56])
    ask(d, "here", shared[:24], 1)
    d.rest()
    hits = d.stats()["store_hits_blocks_total"]
    ask(d, "a", shared)
    d.rest()
    assert d.answer("a") == answer_alone(shared, 6)
    assert d.cached("a") == 56
    assert d.stats()["store_hits_blocks_total"] == hits + 4, "three blocks were here"


def test_an_engine_alone_finds_its_own_evicted_prefix_again(make: Make) -> None:
    rig = make(blocks=32)
    tokens = prompt(1, 80)
    put(rig, tokens)
    for seed in range(2, 6):
        ask(rig, str(seed), prompt(seed, 90), 20)
        rig.rest()
    ask(rig, "again", tokens)
    rig.rest()
    assert rig.answer("again") == answer_alone(tokens, 6)
    assert rig.stats()["store_hits_blocks_total"] >= 8


def test_salted_prompts_do_not_share(make: Make) -> None:
    p, d = make(), make()
    tokens = prompt(1, 50)
    put(p, tokens)
    d.engine.add_request(EngineRequest(RequestId("a"), tokens, cache_salt="other tenant"))
    d.rest()
    assert d.stats()["store_hits_blocks_total"] == 0


def test_what_was_loaded_is_not_put_again(make: Make) -> None:
    p, d = make(), make()
    tokens = prompt(1, 50)
    put(p, tokens)
    ask(d, "a", tokens)
    d.rest()
    assert d.faulty.calls["put"] == 0
    ask(d, "b", prompt(1, 50) + prompt(2, 20))
    d.rest()
    assert d.stats()["store_puts_total"] == 1
    assert p.faulty.calls["put"] == 1


def test_many_at_once_are_all_right(make: Make) -> None:
    p, d = make(blocks=256), make(blocks=256)
    shared = prompt(7, 40)
    texts = {str(seed): shared + prompt(seed, 10 + seed) for seed in range(12)}
    for name, tokens in texts.items():
        ask(p, name, tokens)
    p.rest()
    for name, tokens in texts.items():
        ask(d, name, tokens)
    d.rest()
    for name, tokens in texts.items():
        assert p.answer(name) == d.answer(name) == answer_alone(tokens, 6)
    own = sum((len(tokens) - 1) // 8 - 5 for tokens in texts.values())  # whole blocks of 8 after those that all share
    assert d.stats()["store_hits_blocks_total"] >= 5 + own  # the shared ones once, then from D's cache


# --- failure


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("what", ["exists", "get"])
def test_a_store_that_fails_costs_a_miss_whatever_the_policy(make: Make, what: str, policy: str) -> None:
    p, d = make(), make(policy=policy)
    tokens = prompt(1, 50)
    put(p, tokens)
    d.faulty.raises[what] = RuntimeError("gone")
    ask(d, "a", tokens)
    d.rest()
    assert d.answer("a") == answer_alone(tokens, 6)
    assert d.stats()["store_errors_total"] >= 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_partial_get_is_a_shorter_prefix(make: Make, memory: MemoryBackend, policy: str) -> None:
    p, d = make(), make(policy=policy)
    tokens = prompt(1, 50)
    put(p, tokens)
    lost = list(memory._values)[3]
    real = d.faulty.backend.exists
    d.faulty.backend = _Lying(memory, real)  # it says that the fourth is there still
    memory.discard([lost])
    ask(d, "a", tokens)
    d.rest()
    assert d.answer("a") == answer_alone(tokens, 6)
    assert d.cached("a") == 24
    assert d.stats()["store_hits_blocks_total"] == 3


class _Lying:
    """A back end that says that everything is there."""

    lands_late = False

    def __init__(self, memory: MemoryBackend, _: object) -> None:
        self._memory = memory

    def exists(self, keys: list[str]) -> list[bool]:
        return [True] * len(keys)

    def __getattr__(self, name: str) -> object:
        return getattr(self._memory, name)


def test_a_damaged_value_is_never_decoded_on(make: Make) -> None:
    p, d = make(), make()
    tokens = prompt(1, 50)
    put(p, tokens)
    d.faulty.spoils = True
    ask(d, "a", tokens)
    d.rest()
    assert d.answer("a") == answer_alone(tokens, 6)
    assert d.cached("a") == 0


def test_a_look_up_that_hangs_holds_its_request_no_longer_than_its_time(make: Make) -> None:
    now = [0.0]
    rig = make(clock=lambda: now[0], settings=PATIENT)
    rig.faulty.hangs.add("exists")
    ask(rig, "a", prompt(1, 50))
    rig.until(lambda: rig.faulty.inside == 1)
    ask(rig, "b", prompt(2, 6))
    rig.until(lambda: len(rig.answer("b")) == 6)
    assert rig.answer("a") == [], "it waits, and the one behind it went on"
    now[0] = PATIENT.lookup_timeout_s + 2.0
    rig.until(lambda: len(rig.answer("a")) == 6)
    rig.faulty.go_on()
    rig.rest()
    assert rig.stats()["store_errors_total"] == 1


def test_the_node_times_a_look_up_out_first(make: Make) -> None:
    rig = make(settings=EngineStoreSettings(lookup_timeout_s=0.05))
    rig.faulty.hangs.add("exists")
    ask(rig, "a", prompt(1, 50))
    rig.until(lambda: len(rig.answer("a")) == 6)
    rig.faulty.go_on()
    rig.rest()
    assert rig.answer("a") == answer_alone(prompt(1, 50), 6)


def test_more_questions_than_a_shelf_takes_are_computed(make: Make) -> None:
    rig = make(settings=msgspec.structs.replace(PATIENT, asks_max=1), blocks=256)
    rig.faulty.hangs.add("exists")
    for seed in range(4):
        ask(rig, str(seed), prompt(seed, 50))
    rig.until(lambda: len(rig.answer("3")) == 6)
    rig.faulty.go_on()
    rig.rest()
    assert all(rig.answer(str(seed)) == answer_alone(prompt(seed, 50), 6) for seed in range(4))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_get_that_is_refused_is_computed(make: Make, policy: str) -> None:
    p, d = make(), make(policy=policy, settings=msgspec.structs.replace(PATIENT, asks_max=1))
    tokens = prompt(1, 50)
    put(p, tokens)
    d.faulty.hangs.add("get")
    ask(d, "a", tokens)
    d.until(lambda: d.faulty.inside == 1)
    ask(d, "b", tokens)
    found = d.storing._prompts["a"]
    asked = d.connector._asked["b"]
    d.storing._prompts["b"] = StoredPrompt(asked, found.hashes, found.usable, Phase.FOUND, 6)  # answered before
    d.until(lambda: len(d.answer("b")) == 6)
    d.faulty.go_on()
    d.rest()
    assert d.answer("a") == d.answer("b") == answer_alone(tokens, 6)


# --- aborts and preemption


def test_an_abort_during_the_look_up_leaves_nothing(make: Make) -> None:
    rig = make()
    rig.faulty.hangs.add("exists")
    ask(rig, "a", prompt(1, 50))
    rig.until(lambda: rig.faulty.inside == 1)
    rig.engine.abort(RequestId("a"))
    rig.turn()
    assert rig.outputs[-1].status is RequestStatus.ABORTED
    rig.faulty.go_on()
    rig.rest()
    rig.until(lambda: not rig.storing._asks)


def test_an_abort_during_a_get_keeps_the_blocks_until_the_get_has_ended(make: Make) -> None:
    p, d = make(), make()
    tokens = prompt(1, 50)
    put(p, tokens)
    d.faulty.hangs.add("get")
    ask(d, "a", tokens)
    d.until(lambda: d.faulty.inside == 1)
    held = d.storing.held_blocks
    assert held == 6
    d.engine.abort(RequestId("a"))
    d.engine.step()
    assert d.storing.held_blocks == held, "told only by its end"
    d.rest()  # cancelled, though the back end still hangs
    assert d.faulty.inside == 1
    ask(d, "b", prompt(2, 50))
    d.rest()
    d.faulty.go_on()
    assert d.answer("b") == answer_alone(prompt(2, 50), 6)


def test_requests_preempted_around_their_loads_are_computed_here(make: Make) -> None:
    p, d = make(), make(blocks=12)
    texts = {str(seed): prompt(seed, 30) for seed in range(3)}
    for name, tokens in texts.items():
        put(p, tokens, name)
    for name, tokens in texts.items():
        ask(d, name, tokens, 30)
    d.rest()
    for name, tokens in texts.items():
        assert d.answer(name) == answer_alone(tokens, 30)
    gets = d.stats()["store_gets_total"]
    assert 1 <= gets <= 3, "each was loaded once at most"


def test_a_put_under_way_keeps_its_blocks_while_the_request_is_preempted_and_ends(make: Make) -> None:
    rig = make(blocks=24, prefix_caching=False)
    rig.faulty.hangs.add("exists")
    first = prompt(1, 60)
    ask_known(rig, "a", first, 1)
    rig.until(lambda: len(rig.answer("a")) == 1)
    assert rig.doorway.put_blocks == 7
    before = _contents(rig)
    for seed in range(2, 5):
        ask_known(rig, str(seed), prompt(seed, 50), 30)
    rig.until(lambda: len(rig.answer("4")) == 30)
    assert _contents(rig) == before, "what is being put was written over"
    rig.faulty.go_on()
    rig.rest()


def ask_known(rig: StoreRig, name: str, tokens: tuple[int, ...], answer: int) -> None:
    """A request of which it is known that the store has nothing."""
    ask(rig, name, tokens, answer)
    rig.storing.brought(rig.connector._asked[name])


def _contents(rig: StoreRig) -> bytes:
    [blocks] = [blocks for key, blocks in rig.doorway._pins.items() if key == ("put", 1)]
    return bytes(rig.engine.memory.pages(0)[:, blocks].tobytes())


def test_puts_pin_at_most_half_of_the_pool(make: Make) -> None:
    rig = make(blocks=32)
    rig.faulty.hangs.add("exists")
    for seed in range(3):
        ask_known(rig, str(seed), prompt(seed, 64), 1)
        rig.until(lambda seed=seed: len(rig.answer(str(seed))) == 1)  # type: ignore[misc]
    assert rig.doorway.put_blocks == 16
    assert rig.storing.counts["puts.skipped"] == 1
    rig.faulty.go_on()
    rig.rest()


# --- the store as second source


def fail_at_match(rig: StoreRig, name: str) -> None:
    rig.turn()
    assert any(isinstance(event, ev.Wanted) for event in rig.events)
    rig.doorway.hand_in(fx.MatchFailed(RequestId(name), fx.End(Reason.PEER_GONE, "killed")))


def fail_by_report(rig: StoreRig, name: str) -> None:
    """The handoff got blocks and failed; its own parts are not at rest for a while."""
    rig.turn()
    rig.doorway.hand_in(fx.MatchFound(RequestId(name)))
    rig.until(lambda: any(isinstance(event, ev.Allocated) for event in rig.events))
    rig.doorway.hand_in(fx.Report(RequestId(name), fx.End(Reason.TRANSFER_TIMEOUT, "killed")))


FAILURES = [fail_at_match, fail_by_report]


def rest_after(rig: StoreRig, fail: Callable[[StoreRig, str], None], name: str) -> None:
    if fail is fail_by_report:
        rig.until(lambda: any(each.status is not None and each.request_id == name for each in rig.outputs))
        assert rig.doorway.holds(RequestId(name)), "still in quarantine, and the request is over"
        rig.doorway.hand_in(fx.DropHold(RequestId(name), handoff_id(TransferId("1" * 32))))
    rig.rest()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fail", FAILURES)
def test_a_failed_handoff_is_loaded_from_the_store(make: Make, fail: Callable[..., None], policy: str) -> None:
    p, d = make(), make(policy=policy)
    tokens = prompt(1, 50)
    put(p, tokens)
    d.engine.add_request(handed("a", tokens))
    fail(d, "a")
    rest_after(d, fail, "a")
    assert d.answer("a") == answer_alone(tokens, 6)
    assert d.cached("a") == 48
    assert d.stats()["second_source_total"] == 1


@pytest.mark.parametrize("there", [0, 24])
@pytest.mark.parametrize("fail", FAILURES)
def test_with_fail_the_store_must_have_it_all(make: Make, fail: Callable[..., None], there: int) -> None:
    p, d = make(), make(policy="fail")
    tokens = prompt(1, 50)
    if there:
        put(p, tokens[:there])
    d.engine.add_request(handed("a", tokens))
    fail(d, "a")
    rest_after(d, fail, "a")
    assert d.answer("a") == []
    assert "killed" in d.reason("a")
    assert d.stats()["second_source_total"] == 0


@pytest.mark.parametrize("fail", FAILURES)
def test_with_recompute_a_part_is_enough(make: Make, fail: Callable[..., None]) -> None:
    p, d = make(), make()
    tokens = prompt(1, 50)
    put(p, tokens[:24])
    d.engine.add_request(handed("a", tokens))
    fail(d, "a")
    rest_after(d, fail, "a")
    assert d.answer("a") == answer_alone(tokens, 6)
    assert d.cached("a") == 24
    assert d.stats()["second_source_total"] == 1


def test_with_fail_a_get_that_falls_short_is_the_handoffs_failure(make: Make) -> None:
    p, d = make(), make(policy="fail")
    tokens = prompt(1, 50)
    put(p, tokens)
    d.faulty.raises["get"] = RuntimeError("gone")
    d.engine.add_request(handed("a", tokens))
    fail_at_match(d, "a")
    d.rest()
    assert d.reason("a").startswith("peer_gone")
    assert d.stats()["second_source_total"] == 0


def test_an_abort_after_a_failed_handoff_leaves_nothing(make: Make) -> None:
    d = make()
    d.faulty.hangs.add("exists")
    d.engine.add_request(handed("a", prompt(1, 50)))
    fail_at_match(d, "a")
    d.until(lambda: d.faulty.inside == 1)
    d.engine.abort(RequestId("a"))
    d.faulty.go_on()
    d.rest()


def test_a_report_after_an_abort_asks_no_store(make: Make) -> None:
    d = make()
    d.engine.add_request(handed("a", prompt(1, 50)))
    d.turn()
    d.doorway.hand_in(fx.MatchFound(RequestId("a")))
    d.until(lambda: any(isinstance(event, ev.Allocated) for event in d.events))
    d.engine.abort(RequestId("a"))
    d.report("a", fx.End(Reason.ABORTED))
    d.rest()
    assert not d.faulty.calls


def test_a_good_handoff_asks_no_store(make: Make) -> None:
    d = make()
    d.engine.add_request(handed("a", prompt(1, 50)))
    d.turn()
    d.doorway.hand_in(fx.MatchFound(RequestId("a")))
    d.until(lambda: any(isinstance(event, ev.Allocated) for event in d.events))
    d.report("a", fx.End())
    d.rest()
    assert not d.faulty.calls


# --- copies of answers

COPYING = msgspec.structs.replace(PATIENT, copies_percent=50.0)


def copied(rig: StoreRig) -> int:
    return rig.stats()["store_copied_blocks_total"]


@pytest.mark.parametrize("length", [5, 8, 20])
def test_another_engine_loads_an_answer_as_far_as_it_was_generated(make: Make, length: int) -> None:
    first, second, tokens = make(settings=COPYING), make(), prompt(length, length)
    ask(first, "a", tokens, 60)
    first.until(lambda: len(first.answer("a")) == 30)
    first.until(lambda: not first.doorway.put_blocks)
    so_far = tuple(first.answer("a"))
    second.engine.add_request(msgspec.structs.replace(request("b", tokens, 60), history=so_far))
    second.rest()
    assert [*so_far, *second.answer("b")][-60:] == answer_alone(tokens, 60)
    assert copied(first) == second.stats()["store_hits_blocks_total"] - length // 8 >= 2
    first.engine.abort(RequestId("a"))


def test_an_answer_is_not_copied_unless_that_was_asked_for(make: Make) -> None:
    rig = make()
    ask(rig, "a", prompt(1, 20), 40)
    rig.rest()
    assert copied(rig) == 0 and rig.shelf.counters["puts.stored"] == 1


def test_what_was_preempted_is_copied_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, preempted = make(settings=COPYING, blocks=20), list[EngineRequest]()
    drop = rig.connector.preempted
    monkeypatch.setattr(rig.connector, "preempted", lambda each: (preempted.append(each), drop(each)))
    for name in "abc":
        ask(rig, name, prompt(ord(name), 20), 60)
    rig.rest()
    for name in "abc":
        assert rig.answer(name) == answer_alone(prompt(ord(name), 20), 60)
    assert preempted
    assert 0 < copied(rig) <= 3 * (79 // 8 - 2)


def test_after_a_reset_of_the_cache_an_answer_is_copied_no_more(make: Make) -> None:
    rig = make(settings=COPYING)
    ask(rig, "a", prompt(1, 20), 60)
    rig.until(lambda: copied(rig) == 1)
    rig.storing.reset()
    rig.rest()
    assert copied(rig) == 1
