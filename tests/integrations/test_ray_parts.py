"""kvbaton under Ray Serve, as far as it needs no Ray: identity, request shapes, settings, and D's way with one request.

`make ray-test` runs the rest against a real Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.api.params import Mode
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.integrations import ray as package
from kvbaton.integrations.ray import request_shaping
from kvbaton.integrations.ray.orchestrator import ANY, OrchestrationSettings, Orchestrator, PrefillBreaker
from kvbaton.integrations.ray.replica_identity import check_shared, joined, replica_name, side_of
from kvbaton.node.prompt_account import HANDOFF, word_of
from kvbaton.observe.codes.reasons import PLANNED
from kvbaton.protocol.ids import is_worker_id

TICKET = {"do_remote_prefill": True, "ticket": "t"}


@dataclass
class Asked:
    """As much of Ray's request models as is used."""

    prompt: Any = "once"
    request_id: str = "r"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    stream: bool = True
    stream_options: dict[str, bool] | None = None
    stop: list[str] | None = None
    ignore_eos: bool = False
    kv_transfer_params: Any = None

    def model_copy(self, *, deep: bool) -> Asked:
        assert deep
        return copy.deepcopy(self)


# --- without Ray


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
@pytest.mark.parametrize("name", package.__all__)
def test_what_needs_ray_says_so(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ray\[serve\]==2.60.0'"):
        getattr(package, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'build'"):
        _ = package.build


def test_each_life_of_a_replica_has_a_name_of_its_own() -> None:
    names = {replica_name("prefill", "k3x9/a7 bq") for _ in range(50)}
    assert len(names) == 50, "the same replica id, drawn again"
    assert all(is_worker_id(name) and name.startswith("prefill-k3x9-a7-bq-") for name in names)
    assert is_worker_id(replica_name("decode", "x" * 500))


def test_a_side_is_known_by_its_role() -> None:
    assert side_of({"kv_role": "kv_producer"}) == "prefill"
    assert side_of({"kv_role": "kv_consumer"}) == "decode"
    with pytest.raises(ValueError, match=r"kv_transfer_config\.kv_role: got 'kv_both'"):
        side_of({"kv_role": "kv_both"})


SHARED = {"registry": "tcp://10.0.0.5:7700", "join_token_file": "/run/token", "mode": "push"}


def test_replicas_of_one_configuration_are_members_of_their_own() -> None:
    one, other = joined(SHARED, "decode", "a"), joined(SHARED, "decode", "a")
    assert one["name"] != other["name"] and one["http_address"] == "" and one["control_host"] == "auto"
    assert one | {"name": ""} == other | {"name": ""} and SHARED.items() <= one.items()
    assert ConnectorSettings.parse(one).joins
    assert joined({**SHARED, "control_host": "10.0.0.9"}, "decode", "a")["control_host"] == "10.0.0.9"


@pytest.mark.parametrize("field", ["name", "keys", "peers", "control_port", "http_address"])
def test_what_cannot_be_shared_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=rf"kv_connector_extra_config\.{field}: each replica makes its own"):
        check_shared({**SHARED, field: "x"})
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.registry: missing"):
        check_shared({"join_token_file": "/run/token"})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rest": 1}, r"kvbaton\.rest: unknown; the keys are choose_timeout_s"),
        ({"rest_s": 0}, r"kvbaton\.rest_s: got 0.0, expected seconds"),
        ({"rest_s": float("nan")}, r"kvbaton\.rest_s"),
        ({"prefill_tries": 0}, r"kvbaton\.prefill_tries: got 0"),
        ({"prefill_tries": "two"}, r"kvbaton: .*prefill_tries"),
    ],
)
def test_settings_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OrchestrationSettings.parse(given)


def test_p_computes_one_token_of_one_answer() -> None:
    asked = Asked(max_tokens=50, min_tokens=7, n=3, stop=["x"], stream_options={"include_usage": True})
    for_p = request_shaping.prefill_request(asked, {"a": 1})
    assert (for_p.max_tokens, for_p.min_tokens, for_p.n, for_p.stream) == (1, 1, 1, False)
    assert for_p.stop is None and for_p.stream_options is None and for_p.ignore_eos
    assert for_p.max_completion_tokens is None, "not set by the client: not set here"
    assert request_shaping.prefill_request(Asked(max_completion_tokens=9), {}).max_completion_tokens == 1
    assert asked == Asked(max_tokens=50, min_tokens=7, n=3, stop=["x"], stream_options={"include_usage": True})


def test_what_a_client_says_of_kv_is_dropped() -> None:
    forged = Asked(kv_transfer_params={"ticket": "forged"})
    assert request_shaping.decode_request(forged, None).kv_transfer_params is None
    assert request_shaping.prefill_request(forged, {"a": 1}).kv_transfer_params == {"a": 1}


def test_both_legs_of_a_stream_name_one_transfer() -> None:
    source, target = request_shaping.legs(Mode.STREAM, "r 1", "p", "d")
    assert target is not None and source["transfer_id"] == target["transfer_id"]
    assert source["transfer_id"] != request_shaping.legs(Mode.STREAM, "r 2", "p", "d")[0]["transfer_id"]
    assert request_shaping.legs(Mode.PULL, "r", "p", "d")[1] is None


@pytest.mark.parametrize(
    ("asked", "one"),
    [
        (Asked("text"), True),
        (Asked([1, 2, 3]), True),
        (Asked(["text"]), True),
        (Asked(["a", "b"]), False),
        (Asked([[1], [2]]), False),
        (Asked("text", n=2), False),
        (Asked("text", n=None), True),
    ],
)
def test_one_prompt_and_one_answer(asked: Asked, one: bool) -> None:
    assert request_shaping.has_one_prompt(asked) is one


def test_a_rest_ends_with_one_that_tries() -> None:
    now = [0.0]
    breaker = PrefillBreaker(5.0, lambda: now[0])
    assert breaker.allows("a")
    breaker.failed("a")
    assert not breaker.allows("a") and breaker.allows("b") and breaker.allows(ANY)
    now[0] = 5.0
    assert breaker.allows("a") and not breaker.allows("a"), "one tries, the others wait for what becomes of it"
    breaker.worked("a")
    assert breaker.allows("a") and len(breaker) == 0


def test_replicas_that_are_gone_are_forgotten() -> None:
    now = [0.0]
    breaker = PrefillBreaker(5.0, lambda: now[0])
    for number in range(1000):
        now[0] += 1.0
        breaker.failed(f"replica{number}")
    assert len(breaker) <= 11


# --- D's way with one request


class DiedError(Exception):
    """A replica's process is gone."""


@dataclass
class Prefills:
    """Ray's handle of a prefill deployment: `replicas` in the order in which Ray would choose them."""

    replicas: list[tuple[str, Callable[[], Any]]]
    chosen: list[str] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    released: int = 0
    cancelled: int = 0

    @contextlib.asynccontextmanager
    async def choose_replica(self, request: Any) -> AsyncIterator[Any]:
        if len(self.chosen) >= len(self.replicas):
            await asyncio.Event().wait()  # as Ray does while there is none
        name, says = self.replicas[len(self.chosen)]
        self.chosen.append(name)
        try:
            yield SimpleNamespace(replica_id=name, replica_metadata={"name": f"p-{name}"}, says=says)
        finally:
            self.released += 1

    def dispatch(self, selection: Any, request: Any, info: Any) -> Any:
        self.asked.append(request)
        return Response(self, selection.says)


class Response:
    def __init__(self, prefills: Prefills, says: Callable[[], Any]) -> None:
        self.prefills = prefills
        self.says = says
        self.over = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Any]:
        said = self.says()
        if said is HANGS:
            await self.over.wait()
            raise DiedError("cancelled")
        await asyncio.sleep(0)
        yield said

    def cancel(self) -> None:
        self.prefills.cancelled += 1
        self.over.set()


HANGS = object()


def dies() -> Any:
    raise DiedError("SIGKILL")


def answers() -> Any:
    return SimpleNamespace(kv_transfer_params=TICKET)


def refuses(code: int) -> Callable[[], Any]:
    return lambda: SimpleNamespace(error=SimpleNamespace(code=code, message="no"))


@dataclass
class Engine:
    """D's own: says two words, once the KV that it was promised is there."""

    waits_for_kv: bool = False
    asked: list[Any] = field(default_factory=list)
    closed: int = 0

    async def decode(self, request: Any, info: Any) -> AsyncGenerator[Any, None]:
        self.asked.append(request)
        return self._words(request)

    async def _words(self, request: Any) -> AsyncGenerator[Any, None]:
        try:
            if self.waits_for_kv and (request.kv_transfer_params or {}).get("do_remote_prefill"):
                await asyncio.Event().wait()
            yield "one"
            yield "two"
        finally:
            self.closed += 1


class Backend:
    """As `ray_backend` shapes requests."""

    mode = Mode.PULL

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any]) -> Any:
        return request_shaping.prefill_request(request, self._legs(peer)[0])

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any], prefill_response: Any) -> Any:
        return request_shaping.decode_request(request, self._legs(peer)[1])

    def _legs(self, peer: dict[str, Any]) -> Any:
        return request_shaping.legs(Mode(peer["mode"]), peer["nonce"], peer["name"], "d")


@dataclass
class Served:
    words: list[Any]
    outcomes: dict[str, int]
    prefills: Prefills
    engine: Engine

    @property
    def told(self) -> list[str]:
        """Why D was to compute, as its engine counts it."""
        words = [word_of(request.kv_transfer_params) for request in self.engine.asked]
        return [word for word in words if word != HANDOFF]


def serve(
    *replicas: tuple[str, Callable[[], Any]],
    mode: str = "pull",
    requests: int = 1,
    engine: Engine | None = None,
) -> Served:
    """One request after the other; the words of the last."""
    prefills, engine, outcomes = Prefills(list(replicas)), engine or Engine(), Counter[str]()
    settings = OrchestrationSettings(choose_timeout_s=0.3, prefill_timeout_s=0.3, rest_s=60.0)

    async def run() -> list[Any]:
        here = Orchestrator(settings, Backend(), engine.decode, lambda outcome: outcomes.update([outcome]))
        words: list[Any] = []
        for _ in range(requests):
            words = [word async for word in here.answer(prefills, Asked(), None, mode)]
        await asyncio.sleep(0.01)  # legs come to their end by themselves
        return words

    return Served(asyncio.run(run()), dict(outcomes), prefills, engine)


MODES = [str(mode) for mode in Mode]


@pytest.mark.parametrize("mode", MODES)
def test_d_takes_what_p_computed(mode: str) -> None:
    served = serve(("a", answers), mode=mode)
    assert served.words == ["one", "two"] and served.outcomes == {"prefill": 1}
    (for_d,), (for_p,) = served.engine.asked, served.prefills.asked
    assert for_d.stream and not for_p.stream
    if mode == "pull":
        assert for_d.kv_transfer_params == TICKET
    else:
        assert for_d.kv_transfer_params["pair"] == for_p.kv_transfer_params["pair"] == ["p-a", "d"]
        assert for_d.kv_transfer_params["transfer_id"] == for_p.kv_transfer_params["transfer_id"]
    assert served.prefills.released == 1 and served.prefills.cancelled == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [dies, lambda: HANGS, refuses(500), lambda: None], ids=["dies", "hangs", "500", "mute"])
def test_another_p_is_asked(mode: str, bad: Callable[[], Any]) -> None:
    served = serve(("a", bad), ("b", answers), mode=mode, engine=_patient_with("p-b", mode))
    assert served.words == ["one", "two"]
    assert served.prefills.chosen == ["a", "b"] and served.outcomes == {"retried": 1, "prefill": 1}
    assert served.prefills.released == 2, "no reservation is left behind"


def _patient_with(name: str, mode: str) -> Engine:
    """For stream and push: no KV comes from any other P than the one named."""

    class Waits(Engine):
        async def decode(self, request: Any, info: Any) -> AsyncGenerator[Any, None]:
            params = request.kv_transfer_params or {}
            self.waits_for_kv = params.get("pair", [name])[0] != name
            return await super().decode(request, info)

    return Waits()


@pytest.mark.parametrize("mode", MODES)
def test_d_computes_alone_when_every_p_fails(mode: str) -> None:
    served = serve(("a", dies), ("b", dies), mode=mode, engine=Engine(waits_for_kv=True))
    assert served.words == ["one", "two"] and served.outcomes == {"retried": 2, "alone": 1}
    assert served.engine.asked[-1].kv_transfer_params == {"alone": "prefill_failed"}
    assert served.engine.closed == len(served.engine.asked), "what waited for KV was ended"


def test_without_any_p_d_computes_alone_and_asks_nobody_for_a_while() -> None:
    served = serve(requests=5)
    assert served.words == ["one", "two"] and served.outcomes == {"alone": 5}
    assert served.told == ["not_taken"] * 5
    assert served.prefills.released == 0 and served.prefills.chosen == []


def test_a_p_that_failed_is_left_alone() -> None:
    served = serve(("a", dies), ("b", answers), ("a", answers), ("b", answers), requests=2)
    assert served.outcomes == {"retried": 1, "prefill": 2}
    assert len(served.prefills.asked) == 3, "of four replicas chosen, the one that had failed was not asked"


def test_when_every_p_rests_d_computes_alone() -> None:
    served = serve(("a", dies), ("b", dies), *[("a", answers), ("b", answers)] * 3, requests=2)
    assert served.outcomes == {"retried": 2, "alone": 2} and served.told == ["prefill_failed", "prefill_broken"]
    assert len(served.prefills.asked) == 2 and served.prefills.released == len(served.prefills.chosen)


@pytest.mark.parametrize(
    ("wanted", "alone"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": True}, ""),
        ({"logprobs": 3}, ""),
        ({"best_of": 2}, "search"),
        ({"n": 2, "best_of": 2}, ""),
        ({"use_beam_search": True}, "search"),
        ({"prompt_embeds": "e"}, "prompt_embeds"),
    ],
)
def test_what_d_computes_in_any_case_costs_no_p_and_is_counted_as_planned(wanted: dict[str, Any], alone: str) -> None:
    prefills, engine = Prefills([("a", answers)]), Engine()
    request = Asked()
    vars(request).update(wanted)

    async def run() -> list[Any]:
        here = Orchestrator(OrchestrationSettings(), Backend(), engine.decode)
        return [word async for word in here.answer(prefills, request, None)]

    assert asyncio.run(run()) == ["one", "two"] and (prefills.asked == []) is bool(alone)
    assert word_of(engine.asked[0].kv_transfer_params) == (alone or HANDOFF) and (not alone or alone in PLANNED)


@pytest.mark.parametrize(("code", "told"), [(400, "prefill_failed"), (429, "prefill_full")])
def test_what_p_refuses_d_judges(code: int, told: str) -> None:
    served = serve(("a", refuses(code)), ("b", answers))
    assert served.prefills.chosen == ["a"] and served.outcomes == {"alone": 1} and served.told == [told]


def test_a_p_that_hands_nothing_over_is_counted_as_such() -> None:
    """Its engine runs without the connector, say: every answer is right, and D computes all of them."""
    served = serve(("a", lambda: SimpleNamespace(kv_transfer_params=None)))
    assert served.words == ["one", "two"] and served.outcomes == {"alone": 1} and served.told == ["prefill_failed"]


def test_a_p_that_refuses_is_no_p_that_failed() -> None:
    served = serve(("a", refuses(400)), ("a", answers), requests=2)
    assert served.outcomes == {"alone": 1, "prefill": 1}


def test_several_prompts_are_pulled_whatever_is_asked() -> None:
    prefills, engine = Prefills([("a", answers)]), Engine()

    async def run() -> list[Any]:
        here = Orchestrator(OrchestrationSettings(), Backend(), engine.decode)
        return [word async for word in here.answer(prefills, Asked(["a", "b"]), None, "push")]

    assert asyncio.run(run()) == ["one", "two"]
    assert engine.asked[0].kv_transfer_params == TICKET


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_in_mid_answer_ends_d(mode: str) -> None:
    prefills, engine = Prefills([("a", answers)]), Engine()
    here = Orchestrator(OrchestrationSettings(), Backend(), engine.decode)
    answer = here.answer(prefills, Asked(), None, mode)
    assert await anext(answer) == "one"
    await answer.aclose()
    assert engine.closed == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_ends_both_legs(mode: str) -> None:
    prefills, engine = Prefills([("a", lambda: HANGS)]), Engine(waits_for_kv=True)
    here = Orchestrator(OrchestrationSettings(), Backend(), engine.decode)
    asking = asyncio.ensure_future(anext(here.answer(prefills, Asked(), None, mode)))
    while not prefills.asked or (mode != "pull" and not engine.asked):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0.01)
    assert prefills.cancelled == 1 and prefills.released == 1
    assert engine.closed == len(engine.asked)
