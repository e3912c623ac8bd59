"""Order, room and ends: who runs, who waits, who is passed over, and that nothing is kept by anyone who has gone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvbaton.engines.embedded.engine_config import ModelConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Output, RequestState, RequestStatus
from kvbaton.engines.embedded.hooks import BlockIds, Connector, LoadOrder, LoadOutcome, Match, Nothing, NotYet
from kvbaton.protocol.ids import RequestId

from .helpers import SLIDING, TINY, answer_alone, answers, engine, finish, pair, prompt, request, step


@dataclass
class Scripted(Connector):
    """Answers `match` by request id, reports what it is told to; notes ends."""

    answers: dict[str, Match] = field(default_factory=dict)
    reports: list[LoadOutcome] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    ends: list[tuple[str, RequestStatus, BlockIds]] = field(default_factory=list)

    def match(self, request: EngineRequest, local_tokens: int) -> Match:
        self.asked.append(request.request_id)
        return self.answers.get(request.request_id, Nothing())

    def take_reports(self) -> list[LoadOutcome]:
        reports, self.reports = self.reports, []
        return reports

    def request_finished(self, request: EngineRequest, blocks: BlockIds, status: RequestStatus) -> dict[str, object]:
        self.ends.append((request.request_id, status, blocks))
        return {"end": len(self.ends)}


def report(name: str, ok: bool = True, good: int | None = None) -> LoadOutcome:
    return LoadOutcome(RequestId(name), ok, good, "" if ok else "broken")


def test_running_requests_are_served_before_waiting_ones() -> None:
    subject = engine(step_tokens_max=10)
    subject.add_request(request("a", prompt(1, 8), 5))
    step(subject)
    subject.add_request(request("b", prompt(2, 30), 5))
    outputs = step(subject)
    assert [output.request_id for output in outputs] == ["a"]
    assert subject.tokens_last_step == 10
    finish(subject)


def test_no_more_run_at_once_than_configured() -> None:
    subject = engine(seqs_max=3)
    for index in range(8):
        subject.add_request(request(str(index), prompt(index, 5), 4))
    while subject.scheduler.sequences:
        step(subject)
        assert len(subject.scheduler.running) <= 3


def test_a_request_that_finds_no_room_is_not_overtaken() -> None:
    subject = engine(blocks=9)
    subject.add_request(request("a", prompt(1, 30), 10))
    step(subject)
    subject.add_request(request("big", prompt(2, 40), 2))
    subject.add_request(request("small", prompt(3, 3), 2))
    ends = [output.request_id for output in finish(subject) if output.status]
    assert ends == ["a", "big", "small"]


def test_a_connector_that_is_not_ready_holds_up_nobody_else() -> None:
    connector = Scripted({"a": NotYet()})
    subject = engine(connector=connector, seqs_max=1)
    for name in "abcd":
        subject.add_request(request(name, prompt(1, 9), 2))
    ends: list[str] = []
    while len(ends) < 3:
        ends += [output.request_id for output in step(subject) if output.status]
    assert ends == ["b", "c", "d"]
    connector.answers = {}
    assert [output.request_id for output in finish(subject) if output.status] == ["a"]


def test_a_request_that_was_passed_over_keeps_its_place() -> None:
    connector = Scripted({"a": NotYet()})
    subject = engine(connector=connector, seqs_max=1)
    for name in "abc":
        subject.add_request(request(name, prompt(1, 9), 2))
    step(subject)
    connector.answers = {}
    ends = [output.request_id for output in finish(subject) if output.status]
    assert ends == ["b", "a", "c"]


def test_a_loading_request_takes_no_running_slot_and_is_not_asked_again() -> None:
    connector = Scripted({"a": LoadOrder(9)})
    subject = engine(connector=connector, seqs_max=1)
    for name in "ab":
        subject.add_request(request(name, prompt(1, 9), 3))
    step(subject)
    assert subject.stats().loading == 1
    assert len(subject.scheduler.running) == 1
    step(subject)
    assert connector.asked == ["a", "b"]
    connector.reports = [report("a")]
    finish(subject)


def test_a_loaded_request_passes_one_that_finds_no_room() -> None:
    """Otherwise both wait for ever: the first for blocks, the second, which holds them, for its turn."""
    connector = Scripted({"first": NotYet(), "loaded": LoadOrder(30)})
    subject = engine(connector=connector, blocks=7)
    subject.add_request(request("first", prompt(1, 35), 2))
    subject.add_request(request("loaded", prompt(2, 30), 2))
    step(subject)
    connector.answers = {}
    connector.reports = [report("loaded")]
    ends = [output.request_id for output in finish(subject) if output.status]
    assert ends == ["loaded", "first"]


def test_loaded_requests_that_hold_all_blocks_and_cannot_grow_are_computed_instead() -> None:
    connector = Scripted({"a": LoadOrder(16), "b": LoadOrder(16)})
    subject = engine(connector=connector, blocks=6, prefix_caching=False)
    for seed, name in enumerate("ab"):
        subject.add_request(request(name, prompt(seed, 33), 2))
    step(subject)
    assert subject.stats().loading == 1  # the second would not fit as a whole
    subject.pool.touch(taken := subject.pool.allocate(3))
    subject.pool.free(taken)
    connector.answers = {}
    connector.reports = [report("a")]
    step(subject, taken)
    assert not subject.scheduler.running
    subject.pool.unpin(taken)
    told = answers(finish(subject))
    assert told == {RequestId(name): answer_alone(prompt(seed, 33), 2) for seed, name in enumerate("ab")}


def test_when_blocks_run_out_the_last_to_come_gives_way() -> None:
    subject = engine(blocks=8, prefix_caching=False)
    for name in "abc":
        subject.add_request(request(name, prompt(1, 15), 12))
    step(subject)
    step(subject)
    assert subject.stats().running == 3
    step(subject)
    assert [each.request_id for each in subject.scheduler.running] == ["a", "b"]
    assert [each.request_id for each in subject.scheduler.waiting] == ["c"]
    finish(subject)


@pytest.mark.parametrize(
    "state", [RequestState.WAITING, RequestState.LOADING, RequestState.LOADED, RequestState.RUNNING]
)
def test_an_abort_frees_everything_and_is_told_once(state: RequestState) -> None:
    connector = Scripted(
        {"a": {RequestState.WAITING: NotYet(), RequestState.RUNNING: Nothing()}.get(state, LoadOrder(20))}
    )
    subject = engine(connector=connector, seqs_max=1)
    subject.add_request(request("a", prompt(1, 20), 8))
    step(subject)
    if state is RequestState.LOADED:
        subject.add_request(request("b", prompt(2, 20), 50))  # takes the only slot
        step(subject)
        connector.reports = [report("a")]
        step(subject)
    assert subject.scheduler.sequences[RequestId("a")].state is state
    subject.abort(RequestId("a"))
    subject.abort(RequestId("a"))
    subject.abort(RequestId("b"))
    assert [status for name, status, _ in connector.ends if name == "a"] == [RequestStatus.ABORTED]
    outputs = step(subject)
    assert [output.status for output in outputs if output.request_id == "a"] == [RequestStatus.ABORTED]
    assert outputs[0].handoff == {"end": 1}
    if state is RequestState.LOADING:
        connector.reports = [report("a")]
    finish(subject)


def test_an_abort_of_an_unknown_request_is_nothing() -> None:
    subject = engine()
    subject.abort(RequestId("never"))
    assert not subject.has_work()


@pytest.mark.parametrize("ok", [True, False])
def test_an_aborted_load_keeps_its_blocks_until_it_is_reported(ok: bool) -> None:
    connector = Scripted({"a": LoadOrder(20)})
    subject = engine(connector=connector)
    subject.add_request(request("a", prompt(1, 20)))
    step(subject)
    subject.abort(RequestId("a"))
    for _ in range(5):
        step(subject)
        assert subject.pool.free_blocks == 60
        assert subject.has_work()
    connector.reports = [report("a", ok)]
    assert step(subject) == []
    assert subject.pool.free_blocks == 63
    assert not subject.has_work()
    assert len(connector.ends) == 1


def test_the_name_of_a_request_that_is_leaving_cannot_be_used_again() -> None:
    connector = Scripted({"a": LoadOrder(20)})
    subject = engine(connector=connector)
    subject.add_request(request("a", prompt(1, 20)))
    step(subject)
    subject.abort(RequestId("a"))
    with pytest.raises(Exception, match="in use"):
        subject.add_request(request("a", prompt(1, 20)))
    connector.reports = [report("a")]
    finish(subject)


@pytest.mark.parametrize("name", ["unknown", "running", "waiting"])
def test_a_report_that_is_not_due_kills_the_engine(name: str) -> None:
    connector = Scripted({"waiting": NotYet()})
    subject = engine(connector=connector)
    for each in ("running", "waiting"):
        subject.add_request(request(each, prompt(1, 20)))
    step(subject)
    connector.reports = [report(name)]
    with pytest.raises(AssertionError, match="not loading"):
        subject.step()


@pytest.mark.parametrize("abort", [True, False])
def test_a_second_report_kills_the_engine(abort: bool) -> None:
    connector = Scripted({"a": LoadOrder(20)})
    subject = engine(connector=connector)
    subject.add_request(request("a", prompt(1, 20)))
    step(subject)
    if abort:
        subject.abort(RequestId("a"))
    connector.reports = [report("a"), report("a")]
    with pytest.raises(AssertionError, match="not loading"):
        subject.step()


@pytest.mark.parametrize("tokens", [0, -1, 21])
def test_an_offer_that_cannot_be_kills_the_engine(tokens: int) -> None:
    subject = engine(connector=Scripted({"a": LoadOrder(tokens)}))
    subject.add_request(request("a", prompt(1, 20)))
    with pytest.raises(AssertionError, match="offered"):
        subject.step()


def test_a_failed_load_ends_the_request_where_the_policy_says_so() -> None:
    connector = Scripted({"a": LoadOrder(20)})
    subject = engine(connector=connector, on_load_failure="fail")
    subject.add_request(request("a", prompt(1, 20)))
    step(subject)
    connector.reports = [report("a", ok=False)]
    (output,) = step(subject)
    assert (output.status, output.reason, output.handoff) == (RequestStatus.ERROR, "broken", {"end": 1})
    assert [(name, status, len(blocks[0])) for name, status, blocks in connector.ends] == [
        ("a", RequestStatus.ERROR, 3)
    ]
    finish(subject)


def test_a_failed_load_is_computed_where_the_policy_says_so() -> None:
    connector = Scripted({"a": LoadOrder(20)})
    subject = engine(connector=connector)
    subject.add_request(request("a", prompt(1, 20)))
    step(subject)
    connector.answers = {}
    connector.reports = [report("a", ok=False)]
    assert answers(finish(subject)) == {RequestId("a"): answer_alone(prompt(1, 20))}
    assert connector.asked == ["a", "a"]
    assert [status for _, status, _ in connector.ends] == [RequestStatus.LENGTH]


def test_a_request_without_blocks_ends_with_an_empty_list_per_group() -> None:
    connector = Scripted({"a": NotYet()})
    subject = engine(SLIDING, connector)
    subject.add_request(request("a", prompt(1, 20)))
    subject.abort(RequestId("a"))
    assert connector.ends == [("a", RequestStatus.ABORTED, ((), ()))]


def test_a_broken_book_is_noticed() -> None:
    subject = engine()
    subject.add_request(request("a", prompt(1, 20)))
    step(subject)
    subject.pool.touch([1])
    with pytest.raises(AssertionError, match="references"):
        subject.validate()
    subject.validate(pins=[1])
    subject.scheduler.running.clear()
    with pytest.raises(AssertionError, match="in no queue"):
        subject.validate(pins=[1])


@pytest.mark.parametrize("model", [TINY, SLIDING])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_answers_are_right_and_nothing_is_left(seed: int, model: ModelConfig) -> None:
    """Few blocks, random arrivals, aborts, late, failing and partial loads: promises 1 to 3 on one engine."""
    rng = random.Random(seed)
    world = pair(
        model, d={"blocks": rng.choice((20, 30)), "step_tokens_max": rng.choice((7, 64)), "seqs_max": 4}, steps=2
    )
    texts = [prompt(rng.randrange(4), rng.choice((9, 24, 41))) + prompt(index, 5) for index in range(14)]
    for text in texts:
        world.prefill(text)
    outputs: list[Output] = []
    aborted: set[str] = set()
    for index, text in enumerate(texts):
        moves = rng.choice(([], ["load"], ["wait", "wait", "load"], ["fail"], [rng.randint(1, 30)], ["wait", "fail"]))
        world.d.add_request(request(str(index), text, 20, handoff=list(moves)))
        for _ in range(rng.randint(0, 4)):
            outputs += step(world.d)
        if rng.random() < 0.2:
            aborted.add(name := str(rng.randrange(index + 1)))
            world.d.abort(RequestId(name))
    outputs += finish(world.d)
    ends = [output for output in outputs if output.status]
    assert sorted(int(output.request_id) for output in ends) == list(range(14))
    assert sorted(int(name) for name, _ in world.borrower.finished) == list(range(14))
    told = answers(outputs)
    for output in ends:
        expected = answer_alone(texts[int(output.request_id)], 20, model)
        if output.status is RequestStatus.ABORTED:
            assert output.request_id in aborted
            assert told[output.request_id] == expected[: len(told[output.request_id])]
        else:
            assert told[output.request_id] == expected
