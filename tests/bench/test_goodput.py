"""What counts as good, where a capacity lies, what is asked next; and the command, also on a cluster of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import signal
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvbaton.cli.main import main
from kvbaton.processes.child_process import Say
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.load import request_plan
from kvbaton_proof.bench.load.open_loop import Answer, Pace, Record, TokenStream
from kvbaton_proof.bench.load.request_plan import Ask, Piece, TraceError
from kvbaton_proof.bench.serve import goodput
from kvbaton_proof.bench.serve.goodput import Capacity, GoodputReport, Level
from kvbaton_proof.bench.serve.goodput_run import Fault, Sweep, Swept, hurt_by_plan, made_whole
from kvbaton_proof.bench.serve.serve_parts import Slo
from kvbaton_proof.bench.serve.site import Site

SLO = Slo(ttft=0.5, itl_p99=0.05)
RIGHT = dict.fromkeys(range(9), b"right")


def record(index: int, *, ttft_s: float = 0.1, sent_s: float = 0.0, gaps: tuple[float, ...] = (0.01,) * 3,
           digest: bytes = b"right", error: str = "") -> Record:  # fmt: skip
    answer = None if error else Answer(ttft_s, ttft_s + sum(gaps), gaps, len(gaps) + 1, digest)
    return Record(Ask(index, 0.0, (Piece("u", 10),), 4), sent_s, 1.0, answer, error)


def judged(*records: Record, references: dict[int, bytes] = RIGHT) -> Level:
    return goodput.level_of(records, references, SLO, number=1, target="pull", rate=2.0)


def level(rate: float, share: float, *, number: int = 1) -> Level:
    good = round(share * 1000)
    return Level(
        round=number, target="pull", rate=rate, sent=1000, good=good, late=1000 - good, wrong=0, failed=0, errors={},
        faults={}, ttft_p50_ms=None, ttft_p99_ms=None, itl_p99_ms=None,
    )  # fmt: skip


def test_only_right_answers_within_the_objectives_are_good() -> None:
    found = judged(
        record(0), record(1, ttft_s=0.6), record(2, gaps=(0.01, 0.2)), record(3, digest=b"another's"),
        record(4, error="status 503"), record(5, error="status 503"),
    )  # fmt: skip
    assert (found.sent, found.good, found.late, found.wrong, found.failed) == (6, 1, 2, 1, 2)
    assert found.errors == {"status 503": 2} and found.share == pytest.approx(1 / 6)
    assert goodput.complaints([found]) == ["pull at 2/s, round 1: 1 of 6 answers are not the reference's"]


def test_a_wrong_answer_in_time_is_worth_nothing_and_one_without_a_reference_is_not_judged() -> None:
    assert judged(record(0, digest=b"another's")).good == 0
    assert judged(record(8_000)).wrong == 1, "the reference has answered everything"
    assert judged(record(0, digest=b"another's"), references={}).good == 1


def test_an_answer_is_held_to_its_reference_as_far_as_that_is_sure() -> None:
    told = b"".join(
        b'data: {"choices": [{"text": "x", "token_ids": [%d], "logprobs": {"top_logprobs": [{"a": -1, "b": %g}]}}]}\n\n'
        % each for each in ((5, -2.0), (6, -1.5), (7, -1.01), (8, -3.0))
    )  # fmt: skip
    stream = TokenStream(0.0)
    stream.feed(told + b"data: [DONE]\n\n", 1.0)
    reference = stream.answer(4)
    assert isinstance(reference, Answer) and goodput.sure(reference, 0.02) == (5, 6), "7 was a near tie"
    references = {0: goodput.sure(reference, 0.02)}
    for ids, right in (((5, 6, 9, 9), True), ((5, 9, 7, 8), False), ((5,), False), ((), False)):
        answer = msgspec.structs.replace(reference, ids=ids)
        assert goodput.is_right(0, answer, references) == right
    assert not goodput.is_right(1, reference, references), "the reference has answered everything"


def test_as_many_of_a_trace_are_sent_as_come_in_the_seconds() -> None:
    asks = [Ask(index, float(index**2), (Piece("u", 10),), 4) for index in range(40)]
    sweep = Sweep(
        asks=asks, seconds=8.0, slo=SLO, rates=(), levels_max=2, pace=Pace(), timeout_s=1.0, seed=3, in_prompt=False
    )
    for rate, count in ((0.1, 2), (2.0, 16), (4.0, 32), (9.0, 40)):
        sent = sweep.at(rate)
        assert len(sent) == count and sent[-1].due_s == pytest.approx((count - 1) / rate), "the rate on the mean"


def test_what_the_client_could_not_send_in_time_counts_against_the_first_token() -> None:
    assert judged(record(0, ttft_s=0.4, sent_s=0.05)).good == 1
    late = judged(record(0, ttft_s=0.4, sent_s=0.15))
    assert (late.good, late.late, late.ttft_p50_ms) == (0, 1, 550.0)


def test_an_objective_of_p99_forgives_one_gap_of_two_hundred() -> None:
    gaps = (0.01,) * 199
    assert judged(record(0, gaps=(*gaps, 0.3))).good == 1
    assert judged(record(0, gaps=(*gaps[:150], *(0.3,) * 50))).good == 0


def test_a_capacity_lies_on_the_line_between_two_rates_or_outside_of_them() -> None:
    levels = [level(1, 1.0), level(2, 0.95), level(4, 0.45), level(8, 0.9)]
    assert goodput.capacity(levels, 0.9) == Capacity(0.9, 2.2), "2 + 2 * 0.05 / 0.5; what comes later is luck"
    assert goodput.capacity(levels, 0.99) == Capacity(0.99, 1.2)
    assert str(goodput.capacity(levels[:1], 0.9)) == "> 1"
    assert str(goodput.capacity(levels[2:3], 0.9)) == "< 4"
    both = [level(1, 1.0), level(2, 1.0), level(2, 0.8, number=2), level(4, 0.7)]
    assert goodput.capacity(both, 0.9).rate == 2.0, "rounds together"


def test_the_spread_over_rounds_is_told() -> None:
    levels = [level(1, 1.0), level(2, 0.8), level(1, 1.0, number=2), level(2, 0.6, number=2)]
    assert goodput.spread(levels, 0.9) == " (1.25 to 1.50)" and goodput.spread(levels[:2], 0.9) == ""
    assert goodput.spread([*levels, level(1, 1.0, number=3)], 0.9) == " (1.25 to 1.50, > 1)"


def test_rates_are_doubled_and_then_narrowed_until_both_capacities_are_known() -> None:
    def offered(bends_at: float, begun: float = 1.0) -> list[float]:
        levels: list[Level] = []
        while (rate := goodput.next_rate(levels, (), 12)) is not None:
            levels.append(level(rate, 1.0 if rate <= bends_at else max(0.0, 1.0 - (rate - bends_at) / rate)))
        return [each.rate for each in levels]

    rates = offered(10.0)
    assert rates[:5] == [1.0, 2.0, 4.0, 8.0, 16.0] and 9 < rates[-1] < 12 and len(rates) <= 12
    assert offered(0.3)[:3] == [1.0, 0.5, 0.25], "one that is slower than the first rate is asked less"


def test_given_rates_are_offered_in_order_and_not_beyond_half() -> None:
    assert goodput.next_rate([], (2.0, 4.0), 9) == 2.0
    assert goodput.next_rate([level(2, 0.6)], (2.0, 4.0), 9) == 4.0
    assert goodput.next_rate([level(2, 0.4)], (2.0, 4.0), 9) is None
    assert goodput.next_rate([level(2, 0.6), level(4, 0.6)], (2.0, 4.0), 9) is None


AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9051690,396,109
2023-11-16 18:15:48.6805900,4000,109
"""


def test_azures_traces_are_read_compressed_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE))
    asks = request_plan.read_file(path)
    assert [(round(ask.due_s, 3), ask.input_tokens, ask.output_tokens) for ask in asks] == [
        (0.0, 374, 44), (2.0, 4000, 109), (4.225, 396, 109),
    ]  # fmt: skip
    kept = request_plan.at_rate(request_plan.shorter(asks, 600), 0.5)
    assert [ask.due_s for ask in kept] == [0.0, pytest.approx(2.0)], "two requests, half a one in each second"
    assert len({ask.pieces for ask in asks}) == 3, "nothing is shared"
    path.write_bytes(gzip.compress(AZURE)[:40])
    with pytest.raises(TraceError, match=r"ends in \.gz"):
        request_plan.read_file(path)


@pytest.mark.parametrize("row", [b"2023-11-16 18:15:46,374", b"yesterday,374,44", b"2023-11-16 18:15:46,0,44"])
def test_a_row_that_cannot_be_meant_is_named(row: bytes) -> None:
    with pytest.raises(TraceError, match=r"^line 3: got .*expected a date and two lengths"):
        request_plan.read([*AZURE.splitlines()[:2], row])


def run(*words: str) -> tuple[int, GoodputReport]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["bench", "goodput", *words, "--json"])
    return status, msgspec.json.decode(out.getvalue(), type=GoodputReport)


def test_a_cluster_whose_decode_engines_are_killed_answers_nothing_wrong(tmp_path: Path) -> None:
    status, report = run(
        "--compare", "stream", "--decode", "2", "--rates", "8", "--requests", "24", "--faults",
        "kill:decode:1s,stop:prefill:1.2s:0.5s",
        "--slo", "ttft=60s,itl=60s", "--trace", "azure-sample", "--out", str(tmp_path), "--name", "small",
    )  # fmt: skip
    (level,) = report.levels
    assert status == 0 and report.ok and level.wrong == 0 and level.faults["kill"] >= 1 and level.faults["stop"] >= 1
    assert level.good + level.late + level.failed == level.sent == 24
    assert report.engines == {"stream": 3} and report.slo == "ttft 60 s, itl_p99 60 s"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "small.json",
        "small.md",
        "small.requests.jsonl",
        "small.svg",
    ]


def test_several_traces_are_asked_of_the_same_engines_each_at_its_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--compare", "stream", "--trace", "azure-sample@8", "--trace", "mooncake-sample@6,12", "--seconds", "2"]
    kept = ["--slo", "ttft=60s,itl=60s", "--out", str(tmp_path), "--name", "two"]
    assert main(["bench", "goodput", *words, *kept]) == 0
    assert capsys.readouterr().err.count("bench: starting") == 1
    found = {}
    for trace in ("azure_sample", "mooncake_sample"):
        report = msgspec.json.decode((tmp_path / f"two-{trace}.json").read_bytes(), type=GoodputReport)
        rows = [msgspec.json.decode(row) for row in (tmp_path / f"two-{trace}.requests.jsonl").open("rb")]
        assert report.ok and f"two-{trace}.svg" in (tmp_path / f"two-{trace}.md").read_text()
        assert len(rows) == sum(level.sent for level in report.levels)
        assert all(row["verdict"] == "good" and row["ttft"] > 0 and row["e2e"] >= row["ttft"] for row in rows)
        found[trace] = [(level.rate, level.sent) for level in report.levels]
    assert found == {"azure_sample": [(8.0, 16)], "mooncake_sample": [(6.0, 12), (12.0, 24)]}


BAD = [
    (["--engine", "vllm", "--shape", "8b"], "argument --shape: only with places for the engines; add: --place 0,1"),
    (["--engine", "vllm", "--device", "cuda"], "argument --device: only with places"),
    (["--place", "0,1"], "argument --place: not an option of the embedded engine; add: --engine vllm"),
    (["--margin", "wide"], "argument --margin: got 'wide', expected nats"),
    (["--json", "--trace", "a", "--trace", "b"], "argument --json: prints one object"),
    (["--rates", "1,x"], "argument --rates: got 'x'"),
    (["--faults", "kill:router:5s"], "argument --faults: got 'kill:router:5s', expected ACT:ROLE:EVERY, such as kill"),
    (["--faults", "kill:decode:5s,stop:any:5s"], "argument --faults: got 'stop:any:5s', expected ACT:ROLE:EVERY"),
    (["--faults", "kill:decode:0"], "argument --faults: got '0', expected at least 0.5 s in kill:decode:0"),
    (["--faults", "kill:any:5", "--url", "http://h:1"], "argument --faults: running servers are not hurt"),
    (["--faults", "reset:any:5"], "argument --faults: embedded engines have no door for a reset"),
    (["--compare", "nixl"], "argument --compare: nixl is not played by embedded engines; add: --engine vllm"),
    (["--contender", "x={}", "--engine", "vllm"], "argument --contender: x: has no kv_connector"),
    (["--trace", "no-such-file"], "argument --trace: no-such-file: No such file"),
    (["--tokens-max", "2"], "argument --tokens-max: 0 of 120 requests"),
    (["--slo", "itl=fast"], "argument --slo: itl: got 'fast', expected seconds, such as 0.5, 2s or 25ms"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_what_cannot_be_meant_costs_one_line_and_starts_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status: int | str | None = 0
    try:
        status = main(["bench", "goodput", *words])
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1 and said in err, err


class Played(Site):
    """Engines of which only their names are there."""

    hands_over = True

    def __init__(self, *names: str) -> None:
        super().__init__("played", "", names)
        self.seen: list[tuple[str, str]] = []
        self.ended = False

    async def kill(self, name: str) -> None:
        self.seen.append(("kill", name))

    def signal(self, name: str, number: signal.Signals) -> None:
        self.seen.append((number.name, name))

    async def reset(self, name: str) -> bool:
        self.seen.append(("reset", name))
        return name == "d0"

    async def revive(self) -> list[str]:
        return ["played d0 ended: no reason"] if self.ended else []

    async def whole(self, within_s: float, say: Say, stop: asyncio.Event) -> None:
        if self.ended:
            raise CommandError("d0 did not serve within 300 s")


Played.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def hurt(*names: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """What a plan of faults does within a second and a half."""

    async def run_it() -> tuple[list[tuple[str, str]], dict[str, int]]:
        faults = [Fault("kill", "p", 0.5), Fault("stop", "d", 0.6, 60.0), Fault("reset", "", 0.7)]
        sweep = Sweep(
            asks=[], slo=SLO, rates=(), levels_max=2, pace=Pace(), timeout_s=1.0, seed=3, in_prompt=False, faults=faults
        )
        site, done, did = Played(*names), asyncio.Event(), Counter[str]()
        hurting = asyncio.create_task(hurt_by_plan(sweep, site, "seed", done, did))
        await asyncio.sleep(1.3)
        done.set()
        await hurting
        return site.seen, dict(did)

    return asyncio.run(run_it())


def test_each_target_meets_the_same_faults_and_what_was_stopped_goes_on_at_the_end() -> None:
    seen, did = hurt("p0", "d0")
    assert did == {"kill": 2, "stop": 1} | {word: did[word] for word in did if word.startswith("reset")}
    assert seen.count(("kill", "p0")) == 2 and seen[-1] == ("SIGCONT", "d0")
    assert seen == hurt("p0", "d0")[0], "the same seed"
    alone, _ = hurt("d0", "d1")
    assert {act for act, _ in alone} == {act for act, _ in seen}, "engines without roles are hurt as often"


def test_an_engine_that_ends_by_itself_is_told_and_a_cluster_that_stays_away_is_left_alone() -> None:
    site, swept = Played("p0", "d0"), Swept()

    def after_a_level(did: Counter[str]) -> dict[str, int]:
        asyncio.run(made_whole(site, did, swept, print, asyncio.Event()))
        return dict(+did)

    assert after_a_level(Counter(kill=1)) == {"kill": 1} and not swept.failures
    site.ended = True
    assert after_a_level(Counter()) == {"died": 1} and swept.lost == {"played"}
    assert swept.failures == ["played d0 ended: no reason", "played did not come back: d0 did not serve within 300 s"]
