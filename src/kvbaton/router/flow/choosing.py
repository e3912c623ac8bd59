"""Which workers one try of a request is sent to, given what its earlier tries have met with.

Law: a request for which no pair is left gets D alone where the fallback allows it, or an error that says why; it is
never sent to a pair that `policy` rules out. `policy` itself is pure; the turns, the roster and the loads are here.

Deadlines of requests: a task that has not come to its end in time is cancelled, and told so.

Law: as `asyncio.timeout_at`, but with one timer for all. It is set for the earliest deadline that it knew of, and then
looks for the next: a request that ends in time, as almost all do, sets and cancels none.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from types import TracebackType

from kvbaton.api.api_errors import ApiError, unavailable
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import PeerId
from kvbaton.router import policy
from kvbaton.router.flow import dialect_table
from kvbaton.router.flow.attempt import ChosenRoute, RoutedCall, Tries
from kvbaton.router.flow.continuing import StreamLife, takes_prompt
from kvbaton.router.policy import Pair, Weights
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.workers.available import AvailableWorkers, View
from kvbaton.router.workers.directory import ListedEngine
from kvbaton.router.workers.worker_load import Loads


class Chooser:
    """Chooses for every try of every request. One per router."""

    def __init__(
        self,
        roster: AvailableWorkers,
        settings: RouterSettings,
        loads: Loads,
        *,
        can_sign: bool,
        on_passed_full: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_passed_full`: a worker that said that it is full was not asked, since another was not."""
        self._roster = roster
        self._settings = settings
        self._loads = loads
        self._can_sign = can_sign
        self._on_passed_full = on_passed_full
        self._turns: dict[Mode | None, Iterator[int]] = defaultdict(itertools.count)

    def route(self, call: RoutedCall, tries: Tries, now: float) -> ChosenRoute:
        """The workers of the next try; `ApiError` where there are none."""
        view = self._roster.view(now)
        self._loads.look(now)
        weights = self._weights(tries)
        if not tries.alone and self._settings.disagg_min_tokens:
            self._spare_prefill(view, tries, weights)
        elif tries.alone == "short" and policy.alone(view.able_alone, 0) is None:
            tries.alone = ""
        if not tries.alone:
            for mode in call.modes:
                able = self._able(view, mode, call.kind, tries.behind)
                if able:
                    pair = policy.choose(able, next(self._turns[mode]), weights, tries.doubts)
                    if pair is not None:
                        self._note_passed(view, {pair.prefill.peer, pair.decode.peer})
                        return ChosenRoute(mode, pair.decode, pair.prefill)
                    # Pairs serve this mode, but this request has failed on all of them. Another mode would ask the same
                    # workers again under another name.
                    break
            if self._settings.fallback is not Fallback.LOCAL:
                raise self._nobody(call, tries, view)
            tries.alone = "fallback"
        able_alone = _taking(view.able_alone, tries.behind)
        worker = policy.alone(able_alone, next(self._turns[None]), weights, tries.doubts)
        if worker is None:
            raise self._nobody(call, tries, view)
        self._note_passed(view, {worker.peer})
        return ChosenRoute(call.modes[0], worker, None)

    def _note_passed(self, view: View, chosen: Set[PeerId]) -> None:
        if view.full and view.full.isdisjoint(chosen):
            self._on_passed_full()

    def other_decoder(self, pair: Pair, mode: Mode, tries: Tries, now: float) -> ListedEngine | None:
        """Another D for P's ticket, which names none, if the one that was chosen drains or left meanwhile."""
        # A prefill takes seconds, and P's KV is as good for any D: dropping it would compute the prompt twice.
        view = self._roster.view(now)
        if pair.decode.peer in view.staying:
            return None
        able = [each for each in view.workers if each.decodes and policy.mismatch(pair.prefill, each, mode) is None]
        return policy.alone(_taking(able, tries.behind), next(self._turns[None]), self._weights(tries), tries.doubts)

    def _able(self, view: View, mode: Mode, kind: BodyKind, behind: StreamLife | None) -> Sequence[Pair]:
        able = view.pairs(mode)
        if behind is not None:
            able = [pair for pair in able if takes_prompt(pair.prefill) and behind.takes(pair.decode)]
        if mode is Mode.PULL:
            return able
        if kind is BodyKind.RESPONSES:  # for which vLLM reads no rank: the legs would come to any two of them
            able = [pair for pair in able if pair.prefill.dp_size == pair.decode.dp_size == 1]
        if self._can_sign:
            return able
        return [pair for pair in able if dialect_table.can_ask(pair, mode, can_sign=False)]

    def _weights(self, tries: Tries) -> Weights:
        settings = self._settings
        seen = {peer: share * tries.tokens for peer, share in tries.seen.items()} if tries.seen else {}
        return Weights(settings.policy, settings.same_host, self._loads.tokens, seen, tries.home, tries.tokens)

    def _spare_prefill(self, view: View, tries: Tries, weights: Weights) -> None:
        """A prompt that some D knows almost whole is not worth a handoff."""
        worker = policy.alone(view.able_alone, 0, weights, tries.doubts)  # who would get it, not who knows most
        known = 0.0 if worker is None else weights.seen.get(worker.peer, 0.0)
        if worker is not None and tries.tokens - known < self._settings.disagg_min_tokens:
            tries.alone = "cached"

    def _nobody(self, call: RoutedCall, tries: Tries, view: View) -> ApiError:
        # The failure that led here says more than that no pair is left.
        if tries.last is not None:
            return tries.last.fault
        mode = call.modes[0]
        said = f"no pair can serve mode {mode}: {policy.explain(view.workers, mode)}"
        if call.alone and policy.alone(view.workers, 0) is not None:
            said = "this request needs one engine for prompt and answer, and no decode worker here computes prompts"
        return unavailable(said)


def _taking(workers: Sequence[ListedEngine], behind: StreamLife | None) -> Sequence[ListedEngine]:
    return workers if behind is None else [each for each in workers if behind.takes(each)]


class Deadlines:
    """Those that have not passed. One per event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._kept: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = math.inf  # when the timer runs out; uvloop's may not say

    def keep(self, deadline: Deadline) -> None:
        self._kept[deadline] = None
        if self._looks_at > deadline.when:
            self._look_at(deadline.when)

    def forget(self, deadline: Deadline) -> None:
        self._kept.pop(deadline, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._looks_at = None, math.inf

    def _look_at(self, when: float) -> None:
        self.close()
        self._timer, self._looks_at = self.loop.call_at(when, self._look), when

    def _look(self) -> None:
        self.close()
        now = self.loop.time()
        for deadline in [each for each in self._kept if each.when <= now]:
            self.forget(deadline)
            deadline.pass_by()
        if self._kept:
            self._look_at(min(each.when for each in self._kept))


class Deadline:
    """A context for the current task, on the event loop's clock; `TimeoutError` if it is not left by then."""

    __slots__ = ("_cancelling", "_deadlines", "_has_passed", "_task", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self.when = when
        self._deadlines = deadlines
        self._has_passed = False

    def __enter__(self) -> None:
        task = asyncio.current_task(self._deadlines.loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._deadlines.keep(self)

    def pass_by(self) -> None:
        self._has_passed = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._has_passed:
            self._deadlines.forget(self)
        # Who else has cancelled the task meanwhile still wants it cancelled
        elif self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error
