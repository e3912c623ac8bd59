"""D's way with one request: ask a P for the prompt's KV, another P if that fails, and compute alone if all fail.

With Ray's own decode server a dead P is an error for every request until Ray has replaced it.

Laws: a failure of P is never the client's: a request that D can compute gets D's answer. Nothing that P must do is
waited for without a deadline. Once D has said something, P no longer matters. D's engine is told why it computes alone,
for its account of prompts. A replica that failed is left alone until its rest is over, and then asked by one request,
whose success ends the rest and whose failure begins another; `ANY` stands for all of them. Ray's reservation of a
replica must be given back after P has answered, whatever has become of the client's request meanwhile: so a request to
P has a task of its own, which ends when P has answered or died, or the leg was given up; then P is told to stop.

How D asks P under Ray Serve, and how long for: checked once, in the driver and again in each replica.

Law: a key that is unknown, or a value that cannot be meant, is refused by its name when the application is built.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.params import Mode
from kvbaton.integrations.ray.request_shaping import (
    alone_request,
    decode_request,
    has_one_prompt,
    is_servers_fault,
    planned_alone,
    word_of_refusal,
)
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.observe.codes.reasons import NOT_TAKEN

FIELD = "kvbaton"
"""Where the settings stand in an `LLMConfig`'s `experimental_configs`."""
_SECONDS = ("choose_timeout_s", "prefill_timeout_s", "rest_s", "linger_s", "health_check_period_s")


class OrchestrationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The argument `kvbaton` of `build_pd_app`. `docs/ray.md` explains each."""

    choose_timeout_s: float = 2.0  # until some P has taken a request; then D computes alone
    prefill_timeout_s: float = 60.0  # until P has computed a prompt, its queue included
    prefill_tries: int = 2  # at so many P, one after the other
    rest_s: float = 5.0  # a P that failed is not asked again for so long
    decode_tries: int = 3  # of a request that had no output yet when its D died
    linger_s: float = 3.0  # a P that is scaled away keeps its KV for so long after its last answer
    health_check_period_s: float = 2.0  # Ray's, of prefill and decode, where deployment_config names none

    def __post_init__(self) -> None:
        for field in _SECONDS:
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{FIELD}.{field}: got {value!r}, expected seconds, above 0")
        for field in ("prefill_tries", "decode_tries"):
            if getattr(self, field) < 1:
                raise ValueError(f"{FIELD}.{field}: got {getattr(self, field)!r}, expected a whole number, at least 1")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> OrchestrationSettings:
        """The settings, or a ValueError that names the key."""
        known = [field.name for field in msgspec.structs.fields(cls)]
        unknown = [str(key) for key in given or {} if key not in known]
        if unknown:
            raise ValueError(f"{FIELD}.{unknown[0]}: unknown; the keys are {', '.join(known)}")
        try:
            return msgspec.convert(dict(given or {}), cls)
        except msgspec.ValidationError as error:
            text = str(error)
            raise ValueError(text if text.startswith(FIELD) else f"{FIELD}: {text}") from None


ANY = ""


class PrefillBreaker:
    """One D's experience with the prefill deployment."""

    def __init__(self, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._until: dict[str, float] = {}

    def allows(self, replica: str) -> bool:
        """Whether to ask it now; whoever is told so after a rest is the one that tries it."""
        until = self._until.get(replica)
        if until is None:
            return True
        if self._clock() < until:
            return False
        self._until[replica] = self._clock() + self._rest_s
        return True

    def failed(self, replica: str) -> None:
        now = self._clock()
        # Of a replica that Ray has replaced nothing more is heard: its entry goes once nobody can be trying it.
        self._until = {each: until for each, until in self._until.items() if until + self._rest_s > now}
        self._until[replica] = now + self._rest_s

    def worked(self, replica: str) -> None:
        self._until.pop(replica, None)
        self._until.pop(ANY, None)

    def __len__(self) -> int:
        return len(self._until)


Prepare = Callable[[str, dict[str, Any]], Any]
"""P's request, given the replica that was chosen and what it published; None: not this one."""


class NotAskedError(Exception):
    """The replica that Ray chose is left alone for now."""


class PrefillLeg:
    """`method`: of Ray's handle of the prefill deployment, bound to what is asked of it."""

    def __init__(self, method: Any, request: Any, raw_request_info: Any, prepare: Prepare) -> None:
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[str] = loop.create_future()  # the replica
        self.answer: asyncio.Future[Any] = loop.create_future()  # the first that P said, None if it said nothing
        self._response: Any = None
        self._task = loop.create_task(self._run(method, request, raw_request_info, prepare))

    async def _run(self, method: Any, request: Any, raw_request_info: Any, prepare: Prepare) -> None:
        try:
            async with method.choose_replica(request) as selection:
                asked = prepare(selection.replica_id, dict(selection.replica_metadata or {}))
                if asked is None:
                    raise NotAskedError(selection.replica_id)
                self._response = method.dispatch(selection, asked, raw_request_info)
                _decide(self.taken, selection.replica_id)
                async for chunk in self._response:
                    _decide(self.answer, chunk)
            _decide(self.answer, None)
        except asyncio.CancelledError:
            self.taken.cancel()
            self.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - Ray's, P's: whoever waits judges it
            for future in (self.taken, self.answer):
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # somebody may have stopped waiting: no complaint at its end

    def give_up(self) -> None:
        """Nobody waits any more."""
        if self._response is None:
            self._task.cancel()
        elif not self.answer.done():
            with contextlib.suppress(Exception):
                self._response.cancel()


def _decide(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


log = logging.getLogger(__name__)

MODE = "mode"
NONCE = "nonce"
CHOICES_MAX = 6
Stream = AsyncGenerator[Any, None]


class PrefillFailedError(Exception):
    """P gave no KV; `is_final`: neither would another P. `word`: of `alone_reasons`, if D computes for that reason."""

    def __init__(self, why: str, word: str = "prefill_failed", *, is_final: bool = False) -> None:
        super().__init__(why)
        self.word = word
        self.is_final = is_final


class Orchestrator:
    """What one decode replica does with requests.

    `backend` shapes the requests, `decode` runs one on the replica's own engine, `count` is told how each was served:
    `prefill`, `retried` (at another P; once for each that failed) or `alone`.
    """

    def __init__(
        self,
        settings: OrchestrationSettings,
        backend: Any,
        decode: Callable[[Any, Any], Awaitable[Stream]],
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._decode = decode
        self._count = count
        self._breaker = PrefillBreaker(settings.rest_s)
        self._failures = 0

    async def answer(self, method: Any, request: Any, info: Any, asked_mode: str = "") -> Stream:
        """Everything that the client gets. `method`: of Ray's handle of the prefill deployment."""
        mode = Mode(asked_mode) if asked_mode in tuple(Mode) else self._backend.mode
        if not has_one_prompt(request):
            mode = Mode.PULL
        word = planned_alone(request)
        for _ in range(0 if word else self._settings.prefill_tries):
            leg: PrefillLeg | None = None
            local: Stream | None = None
            served = False
            try:
                leg, replica, decoding = await self._begin(method, request, info, mode)
                if decoding is None:  # pull: what D is to do is in P's answer
                    params = await self._answer_of(leg, replica)
                    if params is None:
                        raise PrefillFailedError(
                            f"replica {replica} answered without kv_transfer_params", is_final=True
                        )
                    decoding = decode_request(request, params)
                local = await self._decode(decoding, info)
                first = await self._first_of(local, leg, replica)
                served = True  # P's own answer may still be on its way: it is nobody's, and costs nothing
            except PrefillFailedError as error:
                self._say(error)
                word = error.word
                if local is not None:
                    with contextlib.suppress(Exception):
                        await local.aclose()
                if error.is_final:
                    break
                self._count("retried")
                continue
            except StopAsyncIteration:
                return
            finally:
                if leg is not None and not served:
                    leg.give_up()
            self._count("prefill")
            async with contextlib.aclosing(local):
                yield first
                async for chunk in local:
                    yield chunk
            return
        self._count("alone")
        async with contextlib.aclosing(await self._decode(alone_request(request, word), info)) as local:
            async for chunk in local:
                yield chunk

    async def _begin(self, method: Any, request: Any, info: Any, mode: Mode) -> tuple[PrefillLeg, str, Any]:
        """A P has taken the request; with it D's own, unless that must wait for P's answer."""
        if not self._breaker.allows(ANY):
            raise PrefillFailedError("no prefill replica took a request lately", NOT_TAKEN, is_final=True)
        for _ in range(CHOICES_MAX):  # Ray chooses, and may choose one that rests
            with contextlib.suppress(NotAskedError):
                return await self._taken(method, request, info, mode)
        raise PrefillFailedError("all prefill replicas failed lately", "prefill_broken", is_final=True)

    async def _taken(self, method: Any, request: Any, info: Any, mode: Mode) -> tuple[PrefillLeg, str, Any]:
        nonce = secrets.token_hex(8)
        decoding: list[Any] = []

        def prepare(replica: str, peer: dict[str, Any]) -> Any:
            if not self._breaker.allows(replica):
                return None
            told = {**peer, MODE: mode, NONCE: nonce}
            if mode is not Mode.PULL:
                decoding.append(self._backend.prepare_decode_request(request=request, peer=told, prefill_response=None))
            return self._backend.prepare_prefill_request(request=request, peer=told)

        leg = PrefillLeg(method, request, info, prepare)
        try:
            replica = await asyncio.wait_for(asyncio.shield(leg.taken), self._settings.choose_timeout_s)
        except NotAskedError:
            raise
        except TimeoutError:
            leg.give_up()
            self._breaker.failed(ANY)
            raise PrefillFailedError("no prefill replica took the request in time", NOT_TAKEN, is_final=True) from None
        except asyncio.CancelledError:
            leg.give_up()
            raise
        except Exception as error:  # noqa: BLE001 - Ray's: no such deployment, or a replica died under the request
            raise PrefillFailedError(f"{type(error).__name__}: {error}") from None
        return leg, replica, decoding[0] if decoding else None

    async def _answer_of(self, leg: PrefillLeg, replica: str) -> Any:
        """P's parameters for D. A P that refuses the request is not at fault: D will say what is wrong with it."""
        try:
            said = await asyncio.wait_for(asyncio.shield(leg.answer), self._settings.prefill_timeout_s)
        except TimeoutError:
            self._breaker.failed(replica)
            raise PrefillFailedError(f"replica {replica} did not answer in time") from None
        except Exception as error:  # noqa: BLE001 - Ray's or P's
            self._breaker.failed(replica)
            raise PrefillFailedError(f"replica {replica}: {type(error).__name__}: {error}") from None
        if said is None or is_servers_fault(said):
            self._breaker.failed(replica)
            raise PrefillFailedError(f"replica {replica} answered {said!r}")
        self._breaker.worked(replica)
        if getattr(said, "error", None) is not None:
            raise PrefillFailedError(f"replica {replica} refused: {said!r}", word_of_refusal(said), is_final=True)
        return said.kv_transfer_params

    async def _first_of(self, local: Stream, leg: PrefillLeg, replica: str) -> Any:
        """The first that D says, or P's failure if that comes before: D would wait for KV that nobody sends."""
        first = asyncio.ensure_future(anext(local))
        answered = asyncio.ensure_future(self._answer_of(leg, replica))
        try:
            await asyncio.wait({first, answered}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                await answered
            return await first
        finally:
            for each in (first, answered):
                each.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.gather(first, answered, return_exceptions=True)

    def _say(self, error: PrefillFailedError) -> None:
        self._failures += 1
        if worth_saying(self._failures):
            log.warning("[prefill-failed] kvbaton: no KV from a prefill replica: %s", error)
