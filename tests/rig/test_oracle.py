"""How far one engine's answers are trusted, and what is kept of an answer that is not as they are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from kvbaton_proof.gpu_test import gpu_answers, gpu_faults
from kvbaton_proof.gpu_test.sizes import CPU
from kvbaton_proof.rig import oracle
from kvbaton_proof.rig.client import NOT_FOR_D, Answer, Tally, ask
from kvbaton_proof.rig.oracle import MARGIN, Right
from kvbaton_proof.rig.record import Book
from tests.rig.test_client import serving

SURE, NEAR = MARGIN * 2, MARGIN / 2
PROMPT = [1, 2, 3, 4, 5, 6]


def right(*gaps: float) -> Right:
    return Right(tuple("abcdefghijkl"[: len(gaps)]), gaps)


async def answering(request: web.Request) -> web.Response:
    """Its prompt, token by token; token 7 is nearly as likely as another, of 8 the second is not told."""
    body = json.loads(await request.read())
    tokens = [str(token) for token in body["prompt"]]
    likely = [
        {token: -0.5, "other": -0.5 - NEAR if token == "7" else -1.0} if token != "8" else {token: -0.5}
        for token in tokens
    ]
    choice = {"logprobs": {"tokens": tokens, "top_logprobs": likely if body["logprobs"] == 2 else None}}
    usage = {"prompt_tokens_details": {"cached_tokens": 5}}
    params = {"ticket": "one", NOT_FOR_D: 0}
    return web.json_response({"choices": [choice], "usage": usage, "kv_transfer_params": params})


def test_an_answer_is_trusted_up_to_the_first_near_tie() -> None:
    assert right(SURE, SURE, NEAR, SURE).sure == ("a", "b")
    assert right(SURE, SURE).is_whole and not right(SURE, NEAR).is_whole
    assert Right(("a", "b"), ()).sure == (), "of what nothing is known nobody is sure"


def test_what_differs_before_a_near_tie_is_wrong_and_what_differs_after_is_not() -> None:
    tally, known = Tally(), right(SURE, SURE, NEAR, SURE)
    assert tally.count(Answer(tokens=("a", "b", "x", "y")), known.sure)
    assert not tally.count(Answer(tokens=("a", "x", "c", "d")), known.sure)
    assert not tally.count(Answer(tokens=("a",)), known.sure), "an answer that ends too early is wrong"
    assert (tally.right, tally.wrong) == (1, 2)


def test_gaps_and_where_a_prompt_came_from_are_read() -> None:
    async def main() -> tuple[Answer, list[Right | str]]:
        async with serving(answering) as (session, url):
            told = await ask(session, url, [1, 7, 8], deadline_s=20, request_id="one")
            return told, await oracle.learned(session, url, [[1, 2], [1, 7, 8]], 2)

    told, found = asyncio.run(main())
    assert (told.cached, told.request_id, told.gaps) == (5, "one", ())
    assert told.params == {"ticket": "one"}, "else D would say what P had cached, and not what it computed itself"
    assert [each.sure for each in found if isinstance(each, Right)] == [("1", "2"), ("1",)]


class TestChosen:
    def test_whole_answers_come_first_in_their_order(self) -> None:
        found: list[Right | str] = [
            right(*[SURE] * 5, NEAR),
            right(*[SURE] * 6),
            right(*[SURE] * 4, NEAR),
            right(*[SURE] * 6),
            "late",
        ]
        assert oracle.chosen(found, 4) == [1, 3, 0, 2]

    def test_what_is_soon_a_tie_is_never_asked_and_others_are_asked_twice(self) -> None:
        assert oracle.chosen([right(SURE, NEAR, SURE, SURE, SURE), right(*[SURE] * 6)], 3) == [1, 1, 1]

    def test_where_nothing_is_sure_there_is_no_oracle(self) -> None:
        with pytest.raises(ValueError, match="none of 2 prompts"):
            oracle.chosen([right(NEAR), "status 500"], 1)


def test_of_a_wrong_answer_it_is_kept_where_it_differs_and_how_sure_that_was(tmp_path: Path) -> None:
    told = Answer(tokens=("a", "b", "x", "d"), cached=4, request_id="chaos-9")
    found = oracle.doubted("kvbaton", "abort", 3, PROMPT, told, right(SURE, SURE, 0.5, SURE))
    assert (found.at, found.got, found.expected, found.gap) == (2, "x", "c", 0.5)
    page = Book(tmp_path, "standard", "cuda", {}, "").begin("faults")
    doubts = oracle.Doubts("kvbaton", None, "", [found], more=2)  # type: ignore[arg-type]
    oracle.keep(page, doubts)
    oracle.tell(page, [doubts])
    row = page.part.tables[0].rows[0]
    assert len(row) == len(oracle.HEAD) and "4 of 6 tokens not computed by D" in row and "chaos-9" in row
    assert page.part.figures["kvbaton: wrong answers"][0]["gap"] == 0.5 and "2 more" in page.part.notes[0]


def test_an_answer_that_ends_too_early_differs_at_its_end() -> None:
    found = oracle.doubted("kvbaton", "abort", 0, PROMPT, Answer(tokens=("a",)), right(SURE, SURE))
    assert (found.at, found.got, found.expected) == (1, "(none)", "b")


def test_the_second_opinion_is_asked_among_others() -> None:
    peak = under_way = 0

    async def crowded(request: web.Request) -> web.Response:
        nonlocal peak, under_way
        under_way += 1
        peak = max(peak, under_way)
        while peak < 3:
            await asyncio.sleep(0.01)
        answer = await answering(request)
        under_way -= 1
        return answer

    async def main() -> list[str]:
        others = [[3, 4], [5, 6]]
        async with serving(crowded) as (session, url):
            same = await oracle.again(session, url, [1, 2], Right(("1", "2"), (SURE, SURE)), others, 2)
            other = await oracle.again(session, url, [1, 2], Right(("1", "3"), (SURE, SURE)), others, 2)
        return [same, other]

    same, other = asyncio.run(asyncio.wait_for(main(), 60))
    assert same == "as before, among 3 at once"
    assert other == "another answer too, from token 1 (`2`), among 3 at once"


def test_wrong_answers_of_a_pair_are_looked_into_and_not_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "DOUBTS_MAX", 2)

    async def main() -> gpu_faults.WatchedPair:
        async with serving(answering) as (session, url):
            known = Right(tuple(map(str, PROMPT)), (SURE,) * 6)
            pair = gpu_faults.WatchedPair(
                "kvbaton", Path(), {}, session, [PROMPT, [9]], [known.sure], [], lambda text: None, rights=[known],
                doubts=oracle.Doubts("kvbaton", session, url), during="abort",
            )  # fmt: skip
            for _ in range(3):
                assert not pair.count(Tally(), Answer(tokens=("x",)), 0)
            assert not pair.count(Tally(), Answer(error="status 500"), 0), "an error is no wrong answer"
            await pair.looked_into()
        return pair

    doubts = asyncio.run(main()).doubts
    assert doubts is not None
    assert [each.again for each in doubts.found] == ["as before, among 2 at once"] * 2 and doubts.more == 1


def test_prompts_of_answers_that_cannot_be_compared_are_dropped() -> None:
    asked = gpu_answers.questions(CPU)
    everything = asked.everything()
    asked.answers[False] = {id(prompt): right(*[SURE] * 6) for prompt in everything}
    tie, gone, best = asked.fresh["pull"][0], asked.sharing[0], asked.damaged[-1]
    asked.answers[False][id(tie)] = right(SURE, NEAR, SURE)
    del asked.answers[False][id(gone)]
    asked.answers[False][id(best)] = right(*[SURE] * 9)
    before, left = asked.narrowed(CPU.damaged)
    assert before - left == 2 and tie not in asked.fresh["pull"] and gone not in asked.sharing
    assert asked.damaged[0] is best and len(asked.damaged) == CPU.damaged
