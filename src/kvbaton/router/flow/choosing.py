"""Which workers one try of a request is sent to, given what its earlier tries have met with.

Law: a request for which no pair is left gets D alone where the fallback allows it, or an error that says why; it is
never sent to a pair that `policy` rules out. `policy` itself is pure; the turns, the roster and the loads are here.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set

from kvbaton.api.api_errors import ApiError, unavailable
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import PeerId
from kvbaton.router import policy
from kvbaton.router.flow import dialect_table
from kvbaton.router.flow.attempt import ChosenRoute, RoutedCall, Tries
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
                able = self._able(view, mode, call.kind)
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
        worker = policy.alone(view.able_alone, next(self._turns[None]), weights, tries.doubts)
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
        return policy.alone(able, next(self._turns[None]), self._weights(tries), tries.doubts)

    def _able(self, view: View, mode: Mode, kind: BodyKind) -> Sequence[Pair]:
        able = view.pairs(mode)
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
