"""The life of one request: choose workers, call them in the order of the mode, map every failure to its outcome.

Laws: others are asked only while no byte has gone to the client, a bounded number of times, and always with a new
ticket. When one leg fails, or the client goes, the other leg is closed, which aborts the request in that worker, and a
ticket that nobody will use is given back to P. The deadline covers everything.

    failure                                         outcome
    the request is at fault (4xx of a worker)       passed on as it is
    the router has no memory or descriptor left     503 with Retry-After; nobody is blamed
    P refuses, dies, hangs, answers nonsense        another P, at most `prefill_retries` times; then 502, 504, 429, 503,
                                                    or, unless the fallback is `strict`, D alone
    D likewise before its first byte                another pair, at most `decode_retries` times; then the same
    D says that the handoff failed                  another pair, of two others if there are; then 502 with the reason
    D dies after its first byte                     another goes on (`owned_streams`), or an error event ends the stream
    P fails after D's first byte                    counted; D's answer goes on, since D has what it needs
    a worker leaves the list                        its legs are broken off: as if it had died
    nobody can be paired                            D alone; with fallback `strict` 503 with Retry-After
    the deadline passes                             504, or an error event

docs/router.md has the same table with what an operator sees; tests/e2e/router/test_failure_matrix.py tests each row.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvbaton.api.api_errors import bare, out_of_time
from kvbaton.api.bodies import BodyKind
from kvbaton.api.gather import cancel
from kvbaton.api.http.http_types import Header
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.flight_records import WHOLE
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.router.flow import dialect_table, kv_params
from kvbaton.router.flow.aggregated_words import check_kept, handed, word_for, word_params
from kvbaton.router.flow.attempt import ChosenRoute, RoutedCall, Tries, is_of_the_handoff, not_the_clients
from kvbaton.router.flow.choosing import Chooser, Deadline, Deadlines
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.flow.reply import First, Replies, Reply, answered, keep_while
from kvbaton.router.flow.request_admission import LargeBodies
from kvbaton.router.flow.worker_calls import EventStream, Legs, close_late
from kvbaton.router.flow.worker_leg import Leg, LegError, WorkerAnswer
from kvbaton.router.policy import Doubts, Pair
from kvbaton.router.router_flights import (
    DECODE_SENT,
    FIRST_BYTE,
    MOVED,
    PREFILL_SENT,
    HttpCall,
    LogBook,
    Trip,
)
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.router_stats import RouterStats, count
from kvbaton.router.turns.turn_book import TurnBook, TurnTable
from kvbaton.router.workers.available import AvailableWorkers
from kvbaton.router.workers.directory import ListedEngine
from kvbaton.router.workers.prefixes import Prefixes, beginning, pieces, prompt_text
from kvbaton.router.workers.worker_load import Loads, WorkerLoad, answer_tokens, prompt_tokens

log = logging.getLogger(__name__)

Discard = Callable[[ListedEngine, str], None]
"""Tells P that nobody will come with this ticket. Never blocks."""


STALE_MAX = 2
"""Tries that met with a connection closed while idle and count for nothing; a worker that dies looks the same."""


class Flow:
    """Carries calls out. One per router."""

    def __init__(
        self,
        legs: Legs,
        roster: AvailableWorkers,
        settings: RouterSettings,
        stats: RouterStats,
        minter: TicketMinter | None,
        discard: Discard | None = None,
        log_book: LogBook | None = None,
        loads: Loads | None = None,
        prefixes: Prefixes | None = None,
        turns: TurnTable | None = None,
    ) -> None:
        self._legs = legs
        self._roster = roster
        self._settings = settings
        self._stats = stats
        self._minter = minter  # None: nobody here can sign, so kvbaton's own workers are served by pull only
        self._discard = discard
        self._log_book = log_book or LogBook(Gathering())
        self._loads = Loads() if loads is None else loads
        self._prefixes = Prefixes(settings.prefix_pieces_max) if prefixes is None else prefixes
        self._chooser = Chooser(
            roster, settings, self._loads, can_sign=minter is not None, on_passed_full=stats.waits.passed_full
        )
        self._replies = Replies(roster.health, stats, settings.settle_s)
        self._deadlines = Deadlines()
        self._pace = LargeBodies()
        self._turns = TurnBook(minter, settings.turn_s, roster.lists, self._now, stats.waits.turns, turns)

    def _now(self) -> float:
        return self._deadlines.loop.time()

    @property
    def loads(self) -> Mapping[PeerId, int]:
        return self._loads.tokens

    def charge(self, peer: PeerId, tokens: int) -> WorkerLoad:
        """Count what is under way at a worker besides calls."""
        return self._loads.take(peer, tokens)

    async def serve(self, call: RoutedCall) -> Reply:
        """D's answer once its first byte is there; `ApiError` if there will be none."""
        await self._pace.turn(call.size)
        return await self._in_time(call, self._begin(call))

    async def serve_behind(self, call: RoutedCall, left: ChosenRoute, why: str, avoid: frozenset[PeerId]) -> Reply:
        """The same answer from its first token on, from others than those to `avoid`."""
        tries = self._begin(call)
        tries.behind, tries.doubts = call.life, Doubts(avoid=avoid)
        tries.trip.mark(MOVED, f"{why} {left.decode.name}")
        return await self._in_time(call, tries)

    async def _in_time(self, call: RoutedCall, tries: Tries) -> Reply:
        try:
            with Deadline(self._deadlines, call.deadline):
                return await self._serve(call, tries)
        except TimeoutError:
            late = out_of_time("the request's deadline passed before the first byte")
            tries.trip.broke(late)
            raise late from None
        except BaseException as error:
            tries.trip.broke(error)
            raise

    async def _serve(self, call: RoutedCall, tries: Tries) -> Reply:
        # Ends, although it has no counter: every failure either raises in `_note`, or spends one of the bounded retries
        # there, or is one of `STALE_MAX`; and the deadline surrounds it all.
        while True:
            route = self._chooser.route(call, tries, self._now())
            tries.trip.chose("-" if route.prefill is None else route.prefill.name, route.decode.name, route.mode)
            try:
                if route.prefill is None:
                    self._stats.alone[tries.alone] += 1
                    reply = await self._by_itself(call, tries, route)
                else:
                    self._stats.tries[route.mode] += 1
                    reply = await self._handed_over(call, tries, route, Pair(route.prefill, route.decode))
            except LegError as error:
                self._note(call, route, tries, error)
            else:
                tries.trip.mark(FIRST_BYTE, "" if call.stream else WHOLE)
                self._worked(reply.route, tries, call.stream)
                if call.life is not None:
                    call.life.attempts = tries.count + 1
                return reply

    def _begin(self, call: RoutedCall) -> Tries:
        settings = self._settings
        tokens, earlier = prompt_tokens(call.kind, call.fields, settings.chars_per_token), 0
        if call.life is not None:
            tokens, earlier = tokens + len(call.life.history), call.life.attempts
        tries = Tries(tokens, self._trip(call, tokens, earlier), alone=call.alone, earlier=earlier)
        if settings.wants_prefixes:
            text = prompt_text(call.kind, call.fields)
            tries.names, total = pieces(call.kind, call.fields, text)
            tries.seen = self._prefixes.share(tries.names, total)
            if self._minter is not None:  # all routers of a cluster have its key, and no client
                tries.home = beginning(self._minter.key, call.kind, call.fields, text)
        if not tries.alone and tries.tokens < settings.disagg_min_tokens:
            tries.alone = "short"
        return tries

    def _trip(self, call: RoutedCall, tokens: int, attempt: int = 0) -> Trip:
        model = call.fields.get("model")
        asked = HttpCall(call.kind.value, model if isinstance(model, str) else "")
        return self._log_book.begin(call.name, attempt, tokens, call.trace, call.begins_trace, asked)

    # --- asking

    async def _handed_over(self, call: RoutedCall, tries: Tries, route: ChosenRoute, pair: Pair) -> Reply:
        ask = dialect_table.ask(pair, route.mode, self._minter)
        trip = tries.trip
        trip.handoff = ask.handoff
        headers = named = call.named(ask.request_id, trip.leg("decode"))
        if ask.request_id is not None and call.kind is BodyKind.RESPONSES:  # vLLM reads it from the body there
            call = msgspec.structs.replace(call, fields={**call.fields, "request_id": ask.request_id}, data=None)
        asked = self._turns.offered(call, pair.prefill, ask.source)
        if trip.span is not None:
            named = call.named(ask.request_id, trip.leg("prefill"))
            asked = kv_params.traced(asked, trip.leg("prefill"), pair.prefill)
        first, sampled = None, None
        if call.life is not None:
            asked = call.life.told(asked, pair.prefill, self._minter) or asked
            if call.life.wants_first(pair.prefill, pair.decode, route.mode):
                sampled, first = call.life.sampled(), functools.partial(self._replies.says_all, call.life, tries, route)
        body = kv_params.prefill_body(call.kind, call.fields, asked, call.written, sampled)
        source = Leg("prefill", pair.prefill, call.kind.value, named, body, call.tab)
        # D is charged from now on, before it is asked: it is promised, and the next request must not be sent there for
        # being idle. P is let go as soon as it has answered, D with the reply.
        prefilling = self._loads.take(pair.prefill.peer, tries.tokens)
        decoding = self._loads.take(pair.decode.peer, tries.tokens + answer_tokens(call.fields))
        times = [self._now()]
        trip.mark(PREFILL_SENT)
        self._stats.waits.leg("asked", "prefill", pair.prefill.name)
        try:
            if ask.target is None:
                try:
                    computed = await self._prefilled(source, self._patience(call))
                    found = handed(source, computed, ask.needs_answer)
                    trip.answered(kv_params.handoff_of(found[1]))
                    times.append(self._now())
                finally:
                    prefilling.give()
                if first is not None and first(times, computed):
                    self._give_back(pair.prefill, found[1])
                    return Reply(self._replies, route, computed, decoding, trip, prefilled=times)
                # Not where the request id names D: P would hand over to the one that it names.
                can_change = ask.request_id is None
                other = self._chooser.other_decoder(pair, route.mode, tries, self._now()) if can_change else None
                room = pair.decode.context_tokens if call.life is not None and call.life.history else 0
                if other is not None and other.context_tokens >= room:  # a first token was told for that room
                    decoding.give()
                    decoding = self._loads.take(other.peer, tries.tokens + answer_tokens(call.fields))
                    pair, route = Pair(pair.prefill, other), ChosenRoute(route.mode, other, pair.prefill)
                    trip.chose(pair.prefill.name, other.name, route.mode)
                answer = await self._redeemed(call, trip, headers, pair, found)
                return Reply(self._replies, route, answer, decoding, trip, prefilled=times)
            self._stats.tickets += 1
            return await self._both_at_once(call, trip, headers, route, source, ask.target, prefilling, decoding, first)
        except BaseException:
            prefilling.give()
            decoding.give()
            raise

    async def _by_itself(self, call: RoutedCall, tries: Tries, route: ChosenRoute) -> Reply:
        load = self._loads.take(route.decode.peer, tries.tokens + answer_tokens(call.fields))
        try:
            headers = call.named(None, tries.trip.leg("decode"))
            word = word_for(tries.alone, tries.last, self._roster.view(self._now()).workers)
            said = word_params(word, route.decode)
            answer = await self._decode(call, tries.trip, headers, route.decode, said)
            return Reply(self._replies, route, answer, load, tries.trip)
        except BaseException:
            load.give()
            raise

    async def _redeemed(
        self,
        call: RoutedCall,
        trip: Trip,
        headers: Sequence[Header],
        pair: Pair,
        found: tuple[bytes | None, str | None],
    ) -> WorkerAnswer | EventStream:
        """D's answer; if there is none, P learns at once that its lease is for nobody."""
        params, ticket = found
        try:
            # Legs to a worker are broken off at the moment it leaves the list. One that begins after that moment would
            # miss it, and wait for a dead worker until its time is up.
            if not self._roster.lists(pair.decode.peer, self._now()):
                leg = Leg("decode", pair.decode, call.kind.value, headers, None)
                raise leg.failed(502, "left while P computed", "worker_left", lost=True)
            return await self._decode(call, trip, headers, pair.decode, params)
        except BaseException:
            self._give_back(pair.prefill, ticket)
            raise

    async def _both_at_once(
        self,
        call: RoutedCall,
        trip: Trip,
        headers: Sequence[Header],
        route: ChosenRoute,
        leg: Leg,
        params: bytes,
        prefilling: WorkerLoad,
        decoding: WorkerLoad,
        first: First | None,
    ) -> Reply:
        # P's leg is a task, because it may end long after D's first byte, when this method has returned: whatever must
        # happen at its end is a callback of the task. D's is one, because either may fail first.
        times = [self._now()]
        computed: list[WorkerAnswer] = []
        prefill = functools.partial(self._prefilled, leg, self._patience(call))
        source = asyncio.create_task(keep_while(lambda: not target.done(), prefill, computed))
        source.add_done_callback(lambda _: prefilling.give())
        source.add_done_callback(lambda _: times.append(self._now()))
        source.add_done_callback(functools.partial(answered, trip))
        target = asyncio.create_task(self._decode(call, trip, headers, route.decode, params))
        ticket = msgspec.json.decode(params, type=kv_params.Handover).ticket
        unused = functools.partial(self._give_back, leg.worker, ticket)
        try:
            await asyncio.wait((source, target), return_when=asyncio.FIRST_COMPLETED)
            # Where P has failed, its error is raised unless D has answered all the same: if both have failed, P's
            # failure is the cause of D's, and blaming D would take a good worker out. If only P is done, this waits on.
            if source.done() and not (target.done() and target.exception() is None):
                source.result()
                if first is not None and not target.done() and first(times, computed[0]):
                    target.add_done_callback(close_late)
                    await cancel((target,))
                    unused()
                    return Reply(self._replies, route, computed[0], decoding, trip, prefilled=times)
            # Likewise a D that hears nothing, since P hangs: its own timeout may pass first.
            late = target.exception() if target.done() else None
            if isinstance(late, LegError) and late.fault.code == "worker_timeout" and not source.done():
                raise leg.failed(504, "gave no answer while D waited for its KV", "worker_timeout", lost=True)
            return Reply(self._replies, route, await target, decoding, trip, source, unused, times)
        except BaseException:
            # D's stream may open at the very moment of the cancellation: then the task has a result that no one holds,
            # whose connection, and so the request in D, would stay open.
            target.add_done_callback(close_late)
            try:
                await cancel((source, target))
            finally:  # also where a second cancellation ends the wait
                unused()  # P may have leased already, and D will not come for it
            raise

    async def _prefilled(self, leg: Leg, timeout_s: float) -> WorkerAnswer:
        answer = await self._legs.whole(leg, timeout_s)
        check_kept(leg, answer.data)
        return answer

    def _patience(self, call: RoutedCall) -> float:
        """Ends a silent leg just before the deadline ends the request."""
        # If the deadline ended it, the request would be cancelled from outside and no leg would have failed: a worker
        # that hangs would never be suspected by clients whose deadline is shorter than `first_byte_s`.
        return min(self._settings.first_byte_s, max(0.9 * (call.deadline - self._now()), 0.001))

    def _give_back(self, worker: ListedEngine, ticket: str | None) -> None:
        if ticket is not None and self._discard is not None:
            self._stats.discards += 1
            self._discard(worker, ticket)

    async def _decode(
        self, call: RoutedCall, trip: Trip, headers: Sequence[Header], worker: ListedEngine, params: bytes | None
    ) -> WorkerAnswer | EventStream:
        if params is not None and trip.span is not None:
            params = kv_params.traced(params, trip.leg("decode"), worker)
        await self._pace.turn(call.size)
        turn = self._turns.keeps(call, worker)
        params = params if turn is None else turn.added(params)
        params = params if call.life is None else call.life.told(params, worker, self._minter)
        body = kv_params.decode_body(call.data, call.fields, params, call.written)
        body = body if turn is None else turn.asked(body)
        if call.life is not None:
            body = call.life.asked(body, worker)
        leg = Leg("decode", worker, call.kind.value, headers, body, call.tab)
        trip.mark(DECODE_SENT)
        self._stats.waits.leg("asked", "decode", worker.name)
        if call.stream:
            stream = await self._legs.stream(leg, call.deadline, self._patience(call))
            stream.watch = None if turn is None else turn.stream
            return stream
        answer = await self._legs.whole(leg)
        if turn is not None:
            turn.whole(answer.data)
        try:
            data = kv_params.without_params(answer.data)
        except (ValueError, RecursionError):
            raise leg.failed(502, "answered something that is not a JSON object", "bad_answer") from None
        return answer if data is answer.data else WorkerAnswer(data, answer.headers)

    # --- learning

    def _worked(self, route: ChosenRoute, tries: Tries, is_stream: bool) -> None:
        # Refusals were held back until now: another worker could do what they refused, so it was not the request's
        # fault.
        for error in tries.refusals:
            self._blame(error)
        health = self._roster.health
        if health:
            if not is_stream:  # a stream has yet to come to its end
                health.ok(route.decode.peer)
            if route.prefill is not None:
                health.ok(route.prefill.peer)
        if tries.names:
            self._prefixes.note(route.decode.peer, tries.names)
            if route.prefill is not None:
                self._prefixes.note(route.prefill.peer, tries.names)

    def _note(self, call: RoutedCall, route: ChosenRoute, tries: Tries, error: LegError) -> None:
        """Blame a failed leg, and raise its fault where no other worker may be asked."""
        if error.final and is_of_the_handoff(route, error):
            error = not_the_clients(error)
        bare(error)
        count(self._stats.failures, error.fault.code or "none", error.side)
        if not (error.lost or error.stale):
            tries.trip.refused(error.side)
        self._stats.waits.leg("failed", error.side, error.worker.name)
        tries.last = error
        if error.final:
            raise error.fault
        # An idle connection that the worker closed as the request went out: it never saw the request, so this is
        # neither its failure nor a try. Bounded, because a worker that has died looks the same on each pooled
        # connection.
        if error.stale and tries.stale < STALE_MAX:
            tries.stale += 1
            tries.trip.over(Reason.CANCELLED, "a connection had been closed while idle; retried")
            tries.trip = self._trip(call, tries.tokens, tries.count)
            return
        tries.trip.broke(error.fault)
        if tries.alone == "cached":  # the D that knew the prompt has failed; for others a handoff is worth it again
            tries.alone = ""
        if error.lost or error.stale:
            self._blame(error)
        else:
            tries.refusals.append(error)  # it may be the request's fault, unless another worker can do it
        tries.doubt(route, error)
        if error.side == "prefill":
            tries.prefill_failures += 1
            spent = tries.prefill_failures > self._settings.prefill_retries
        else:
            tries.decode_failures += 1
            spent = tries.decode_failures > self._settings.decode_retries
        if spent:
            if (error.side == "decode" and not error.is_handoff) or self._settings.fallback is not Fallback.LOCAL:
                raise error.fault
            tries.alone = "fallback"
        self._stats.retries[error.side] += 1
        tries.trip = self._trip(call, tries.tokens, tries.count)
        log.info("request %s on %s: %s; trying others", call.name, route, error)

    def _blame(self, error: LegError) -> None:
        # A full worker is alive, and counting 429 as failure would break the breaker of exactly those that are in
        # demand. For a failed handoff P, D or the network may be to blame: the pair is not tried again by this request,
        # and that is all that is known.
        if error.busy or error.is_handoff:
            return
        news = self._roster.health.failed(error.worker.peer, self._now())
        if news is not None:
            log.warning("[worker-failing] %s; it is %s now", error, news.value)

    async def close(self) -> None:
        """Nothing that this flow started is left afterwards."""
        self._deadlines.close()
        await self._replies.close()
