"""The connector in the scheduler's process: vLLM's hooks on one side, P's and D's halves and the doorway on the other.

Laws: only the scheduler's thread runs here, and it alone touches the block pool; what the loop decided is taken from
the doorway at `on_new_request`, `get_num_new_matched_tokens`, `build_connector_meta` and `update_connector_output`
(rule 8). No hook raises: each has an answer for its own failure that the engine can live with. None blocks, but for a
nap where vLLM would take one itself.

What has arrived is told to vLLM where it takes in the end of a step, whichever that is, and not by way of the workers:
that would be the end of a step that is still to be scheduled. What has failed goes by the workers, since vLLM looks at
failures before it asks us.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from kvbaton.control.joining.join_client import Enrolment
from kvbaton.control.registry.registry_messages import Role
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.shared.presence import Presence
from kvbaton.engines.side.asks import Ask, ParamsSource, Target, ask_of, wants_kv
from kvbaton.engines.side.decode import DecodeSide, FailedLoads, LoadAdmission
from kvbaton.engines.side.guard import guarded, makes, note, returns
from kvbaton.engines.side.prefill import PrefillSide
from kvbaton.engines.side.protocols import NOT_YET, NOTHING, Grouping, Leaving, LoadVerdict, Tables
from kvbaton.engines.side.store import NoStore, StoreSide
from kvbaton.engines.side.turns import TurnSide
from kvbaton.engines.vllm import connector_parts, counting, interpreter
from kvbaton.engines.vllm.block_pool import LOAD_NAP_S, NAP_S, Pace, PinnedPool, is_exact
from kvbaton.engines.vllm.config.data_parallel import DataParallelPlace
from kvbaton.engines.vllm.connector_parts import BeforeRanks, ConnectorParts, EarlyClaims, SpoiltCache, lookup_of
from kvbaton.engines.vllm.content import request_content
from kvbaton.engines.vllm.content.vllm_compat import compat_key, lookahead
from kvbaton.engines.vllm.content.weights_epoch import WeightsEpoch
from kvbaton.engines.vllm.continued_requests import ContinuedRequests
from kvbaton.engines.vllm.memory.vllm_layout import RankFacts, engine_layout, state_blocks, vllm_groups
from kvbaton.engines.vllm.step_metadata import BatonStep, RankCard, StepDone
from kvbaton.engines.vllm.vllm_stats import Reporting
from kvbaton.node.cluster_node import EngineFacts, new_life
from kvbaton.node.doorway import DropBlocks, ForgetCached, LoadReport, UnpinBlocks
from kvbaton.node.pin_budget import budget_of
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.ranks.rank_messages import RankInvitation

log = logging.getLogger(__name__)

STORE_END_S = 3.0
NO_ANSWER: tuple[bool, dict[str, Any] | None] = (False, None)
WELL = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


class SchedulerSide:
    """One engine's connector. Made early, alive once `ranks_known` and `bind_pool` were called."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: ConnectorSettings,
        enrolment: Enrolment,
        place: DataParallelPlace | None = None,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._config = vllm_config
        self._cache = kv_cache_config
        self._settings = settings
        self._enrolment = enrolment
        self._place = place
        self._decodes: bool = transfer.is_kv_consumer and settings.takes_over
        self._block_pool: Any = None
        self._pace = Pace(lock_step=vllm_config.parallel_config.data_parallel_size > 1)
        self.presence: Presence | None = None
        self.reporting = Reporting()
        self._live: ConnectorParts | None = None
        self._before = BeforeRanks(fails=self._decodes and transfer.kv_load_failure_policy == "fail")
        self._spoilt = SpoiltCache(WeightsEpoch(str(getattr(vllm_config.model_config, "model", ""))))

    @property
    def _prefills(self) -> bool:
        return self._settings.hands_over and bool(self._config.kv_transfer_config.is_kv_producer)

    @property
    def stored(self) -> NoStore:
        """What is known of the shared store."""
        return self._live.stored if self._live is not None else NoStore()

    # --- coming to life

    def bind_pool(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    def ranks_known(self, cards: Mapping[tuple[int, int], Any], versions: Mapping[str, str]) -> None:
        """All workers have registered their caches. Raises where this engine cannot be part of a cluster."""
        if self._live is not None:
            return  # vLLM (0.33) tells it again at each wake-up; a cache that peers may read has not moved
        ordered = [cards[key] for key in sorted(cards)]
        if not all(isinstance(card, RankCard) for card in ordered):
            raise RuntimeError("kvbaton: a worker of this engine did not say where its KV cache lies")
        facts = [msgspec.msgpack.decode(card.facts, type=RankFacts) for card in ordered]
        invitations = [RankInvitation.decode(card.invitation) for card in ordered]
        ahead = lookahead(self._config)
        grouping = Grouping(engine_layout(facts), vllm_groups(facts), state_blocks(self._cache), ahead)
        compat = compat_key(self._config, facts[0].page, self._settings.model_id, versions)
        role: Role = "both" if self._prefills and self._decodes else "prefill" if self._prefills else "decode"
        model = self._config.model_config
        engine = EngineFacts(
            me=new_life(self._enrolment.keyring.name),
            role=role,
            model=str(model.served_model_name or model.model),
            blocks=self._cache.num_blocks,
            layout=grouping.layout,
            compat=compat,
            exact_epochs=is_exact(self._block_pool),
            tp_size=self._config.parallel_config.tensor_parallel_size,
            dp_rank=self._place.http_rank if self._place is not None else 0,
            dp_size=self._place.http_size if self._place is not None else 1,
            continues=connector_parts.continues(self._config),
            context_tokens=0 if grouping.stateful else connector_parts.context_tokens(self._config),
        )
        self.presence = Presence(self._settings, self._enrolment, engine, invitations, self._place)
        self._live = self._come_alive(self.presence, grouping)
        self._spoilt.weights.watch(lambda: self._live)
        self.presence.node.watch.recorder.on_flight.append(self.reporting.tray.add)
        interpreter.share()
        self.presence.start()

    def _come_alive(self, presence: Presence, grouping: Grouping) -> ConnectorParts:
        node, news = presence.node, self._pace.news
        door = node.doorway
        door.wake_engine = news.set
        door.budget = budget_of(self._cache.num_blocks - 1, self._settings.pin_share, self._settings.pin_wait_s)
        pool = PinnedPool(self._block_pool, door.epochs)
        pool.before_reset(self._before_reset)
        presence.observe(pool, self.reporting.prompts, self.reporting.states)
        recomputes = self._config.kv_transfer_config.kv_load_failure_policy == "recompute"
        keeps_prefix = len(self._cache.kv_cache_groups) == 1 and not grouping.stateful
        lookup = lookup_of(self._settings, node, self._enrolment.keyring.ticket_keys[0])
        batch, total = self._config.scheduler_config.max_num_batched_tokens, self._cache.num_blocks
        room = LoadAdmission(grouping, pool, batch) if recomputes else None
        requests = request_content.VllmRequests(grouping, getattr(self._cache, "hash_block_size", None) or 0)
        decode = DecodeSide(door, pool, grouping, requests, recomputes, keeps_prefix, room, total)
        decode.failed = FailedLoads(self.reporting.prompts, self.reporting.refused)
        stored = NoStore()
        if presence.shelf is not None:
            presence.shelf.wake_engine = news.set
            stored = StoreSide(presence.shelf, door, pool, grouping, requests, total)
        prefill = PrefillSide(door, pool, grouping, requests)
        takes = recomputes and self._config.kv_transfer_config.is_kv_consumer
        turns = TurnSide(door, pool, grouping, requests, decode, self._settings.turns, blocks_total=total, takes=takes)
        self.reporting.turn_figures = turns.taker.stats
        weights, way = self._spoilt.weights, connector_parts.continues(self._config)
        continued = ContinuedRequests(door, self.reporting.refused, self._config.model_config, way)
        early = EarlyClaims(self._block_pool, decode, lookup, weights, continued, claims=self._decodes)
        return ConnectorParts(door, pool, prefill, decode, early, stored, turns)

    def shutdown(self) -> None:
        live, self._live = self._live, None
        if live is not None and self.presence is not None:
            self._let_go_of_store(live, self.presence)
            self.presence.stop()

    @guarded(returns(None))
    def _let_go_of_store(self, live: ConnectorParts, presence: Presence) -> None:
        """Drop what is pinned for the store, which reads and writes nothing that is of use from here on."""
        presence.node.end_store(STORE_END_S)
        until = time.monotonic() + STORE_END_S
        while live.door.put_blocks or live.stored.held_blocks:
            self._do_duties(live)
            if time.monotonic() > until:
                return
            self._pace.nap(NAP_S)

    # --- hooks

    @guarded(returns(None))
    def on_new_request(self, request: Any) -> None:
        self.reporting.turn.works()
        if not isinstance(request.kv_transfer_params, dict | None):
            self._strange(request)  # vLLM itself takes it for an object from here on, and would die of anything else
        live = self._live
        if live is None:
            return
        live.early.seen(request)
        self._do_duties(live)
        self.reporting.came(request)
        self._spoilt.came(request)
        if getattr(request, "resumable", False):  # a session whose prompt grows: there is no one prompt to hand over
            live.decode.disowned(request, Reason.ABORTED)
            return
        # What cannot be read ends here, as a failed load or as no handoff: an exception would end the whole engine.
        try:
            ask = ask_of(request, live.early.lookup)
        except ProtocolError as error:
            if self._decodes and wants_kv(request.kv_transfer_params):
                live.decode.refused(request, End(error.reason, error.detail))
            return
        is_used = ask is not None or isinstance(live.stored, StoreSide)
        if is_used and not request_content.is_known(request):
            live.held[request.request_id] = ask
        else:
            self._accept(live, request, ask)

    def _strange(self, request: Any) -> None:
        got, request.kv_transfer_params = type(request.kv_transfer_params).__name__, None
        end = End(Reason.BAD_MESSAGE, f"kv_transfer_params: got {got}, expected an object")
        if self._live is not None and self._decodes:
            self._live.decode.refused(request, end)

    def _accept(self, live: ConnectorParts, request: Any, ask: Ask | None) -> None:
        if isinstance(ask, ParamsSource) and self._prefills:
            live.prefill.accepted(request, ask)
            live.turns.asked(request, ask.turn)
        elif isinstance(ask, Target) and self._decodes:
            live.stored.promised(request.request_id)
            live.decode.accepted(request, ask)
        elif isinstance(ask, Target):
            live.decode.disowned(request, Reason.ABORTED)

    @guarded(returns(NOTHING))
    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        live = self._live
        if live is None:
            return self._before.match(request, local_tokens)
        times = self._spoilt.times
        self._do_duties(live)
        if self._spoilt.times != times:
            return NOT_YET  # the cached blocks that vLLM has found for it are to be used by nobody any more
        if request.request_id in live.held:  # what its KV is of is still looked at, on a thread of its own
            if not request_content.is_known(request):
                return NOT_YET
            self._spoilt.weights.mark(request)  # nothing of it is computed yet; they may be other ones now
            self._accept(live, request, live.held.pop(request.request_id))
            if live.prefill.shortens(request.request_id):
                return NOT_YET  # vLLM has looked up more of it than it is now
        if live.waiting.comes_back(request.request_id):
            return NOT_YET
        if live.pins.is_put_off(request):
            live.waiting.waits(request)
            return NOT_YET
        # A handoff goes before the store: P holds blocks for it until it is told what became of them.
        answer = live.turns.match(request, local_tokens)
        answer = live.decode.match(request, local_tokens) if answer == NOTHING else answer
        if of_store := answer == NOTHING:
            answer = live.stored.match(request, local_tokens)
        self.reporting.prompts.looked(request.request_id, local_tokens, of_store=of_store)
        if getattr(request, "skip_reading_prefix_cache", False):
            return NOTHING  # it wants its whole prompt computed; vLLM before 0.31 takes an answer all the same
        if answer == NOT_YET:
            live.waiting.waits(request)  # nothing may come between this and the answer
        else:
            live.waiting.answered(request.request_id)
        return answer

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        live = self._live
        if live is None:
            self._before.allocated(request, external_tokens)
            return
        try:
            if external_tokens > 0:
                live.resets.begun(request)
            tables = blocks.get_block_ids()
            of_store = live.stored.offers(request.request_id)
            if live.turns.allocated(request, tables, 0 if of_store else external_tokens):
                return
            live.decode.allocated(request, tables, 0 if of_store else external_tokens)
            live.stored.allocated(request, tables, external_tokens)
            if external_tokens == 0:
                live.prefill.begun(request)
        except Exception as error:  # noqa: BLE001 - promise 4; a load that vLLM waits for still gets its report
            note("update_state_after_alloc", error)
            if external_tokens > 0 and not live.stored.reports(request.request_id):
                live.decode.broke(request)
                live.turns.broke(request)

    def build_step(self, scheduled: Any) -> BatonStep:
        """What the workers must know of this step; every step gets one, whatever happens here."""
        self._pace.begin(bool(scheduled.num_scheduled_tokens))
        step, live = self._pace.step, self._live
        if live is None:
            return BatonStep(step, self._before.take_verdicts())
        self._try_duties(live)
        live.resets.scheduled(scheduled.num_scheduled_tokens)
        counting.begun(self.reporting.prompts, scheduled)
        leaving = self._leaving(live, scheduled)
        for request_id in scheduled.preempted_req_ids or ():
            live.stored.preempted(request_id)
        ends_prompts = live.stored.ends_prompts(step, scheduled.num_scheduled_tokens, partial(self._tables, scheduled))
        return BatonStep(step, self._failures(live), leaving, ends_prompts, live.is_awaited)

    @guarded(makes(tuple))
    def _failures(self, live: ConnectorParts) -> tuple[LoadVerdict, ...]:
        live.sort()
        failures, live.failures = tuple(live.failures), []
        for verdict in failures:
            live.resets.reported(verdict.request_id)
        return failures

    @guarded(returns(None))
    def _try_duties(self, live: ConnectorParts) -> None:
        self._do_duties(live)

    @guarded(makes(tuple))
    def _leaving(self, live: ConnectorParts, scheduled: Any) -> tuple[Leaving, ...]:
        prefill = live.prefill
        for request_id in scheduled.preempted_req_ids or ():
            prefill.preempted(request_id)
        ours = prefill.prompts.keys() & scheduled.num_scheduled_tokens.keys()
        chunks = (self._chunk(live, scheduled, request_id) for request_id in ours)
        return tuple(leaving for leaving in chunks if leaving is not None)

    @guarded(returns(None))
    def _chunk(self, live: ConnectorParts, scheduled: Any, request_id: str) -> Leaving | None:
        tables, tokens = self._tables(scheduled, request_id), scheduled.num_scheduled_tokens[request_id]
        return live.prefill.scheduled(self._pace.step, request_id, tokens, tables)

    def _tables(self, scheduled: Any, request_id: str) -> Tables:
        state = getattr(scheduled, "kv_connector_block_state", None)
        found: Tables | None = state.get_block_ids(request_id) if state is not None else None
        if found is None:
            found = self.manager.get_block_ids(request_id)
        return found

    manager: Any = None
    """vLLM's KVCacheManager, where it gave us one."""

    @guarded(returns(None))
    def step_ended(self, output: Any) -> None:
        live, done = self._live, output.kv_connector_worker_meta
        if live is None:
            return
        if isinstance(done, StepDone):
            live.stored.computed(done.number)
            live.prefill.computed(done.number)
        self._tell_arrivals(live, output)
        # With nothing to compute, vLLM would come back in 1 ms. A nap here ends with the arrival that it waits for.
        if isinstance(done, StepDone) and not output.finished_recving and self._is_idle(live, done.number):
            self._pace.nap(LOAD_NAP_S)
            self._tell_arrivals(live, output)

    def _tell_arrivals(self, live: ConnectorParts, output: Any) -> None:
        """Have vLLM look at requests whose KV is there, and at those put aside that wait no more."""
        self._try_duties(live)
        live.sort()
        arrived, over = set(live.arrived), live.waiting.over()
        if arrived or over:
            output.finished_recving = arrived.union(over, output.finished_recving or ())
            live.arrived.clear()
            for request_id in arrived:
                live.resets.reported(request_id)
            for request_id in over:
                live.waiting.back_to_vllm(request_id)

    def _is_idle(self, live: ConnectorParts, step: int) -> bool:
        """Whether no step that computes is on its way, and none can be before something arrives."""
        pace = self._pace
        return not pace.lock_step and live.is_awaited and not live.failures and not pace.computes_since(step)

    @guarded(returns(NO_ANSWER))
    def finished(self, request: Any, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        self.reporting.left(request.request_id)
        live = self._live
        if live is None:
            return NO_ANSWER
        self._spoilt.left(request)
        well = request.status.name in WELL
        if isinstance(live.held.pop(request.request_id, None), Target):
            live.decode.disowned(request, Reason.ABORTED)
        live.waiting.left(request.request_id)
        live.resets.finished(request.request_id)
        live.stored.finished(request, tables, well=well)
        try:  # each half must see the end, whatever the other did with it: both hold blocks for this request
            live.turns.finished(request, tables, well=well and self._spoilt.weights.is_of(request))
            live.decode.finished(request)
        finally:
            try:
                answer = live.prefill.finished(request, tables, well=well)
            finally:
                live.pins.left(request)
                request_content.forget(request)
        return False, answer

    @guarded(returns(False))
    def busy(self) -> bool:
        """Whether vLLM must go on stepping for us alone; not for what it counts itself (a pause waits for us)."""
        live = self._live
        if live is None:
            return False
        loads = live.is_awaited or bool(live.failures)
        if not (live.door.holding or loads):
            return self.reporting.turn.rests()
        self.reporting.turn.works()
        if not loads:  # vLLM asks only when it has nothing to do itself
            self._pace.nap_once(NAP_S)
        return True

    @guarded(returns(False))
    def reset(self) -> bool:
        """Nothing of before is handed over, taken over or stored any more; False while a block is still held."""
        live = self._live
        if live is None:
            return True
        self._do_duties(live)
        live.door.cache_replaced()
        live.stored.reset()
        return not (live.door.pinned_blocks or live.stored.held_blocks)

    # --- helpers

    @guarded(returns(None))
    def _before_reset(self) -> None:
        live = self._live
        if live is not None:
            live.before_reset(self.manager, lambda: self._do_duties(live), self._pace.nap)

    def _do_duties(self, live: ConnectorParts) -> None:
        for duty in live.door.duties():  # each is told once: one that fails must not take the others with it
            try:
                if isinstance(duty, UnpinBlocks | DropBlocks):
                    live.pool.unpin(duty.blocks)
                elif isinstance(duty, ForgetCached):
                    self._spoilt.forget(live, duty)
                else:
                    live.turns.reported(duty)
                    live.decode.reported(duty)
            except Exception as error:  # noqa: BLE001 - promise 4
                note(type(duty).__name__, error)
                if isinstance(duty, LoadReport) and duty.rank == 0:
                    live.decode.fails(duty.request)
        live.stored.take()
        live.turns.do_duties()
