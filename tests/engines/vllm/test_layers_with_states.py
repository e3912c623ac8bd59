"""Layers that keep a state: where it lies, which block it is, what of a prompt P computes, and what ends a handoff."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvbaton.api.params import Mode, TransferParams
from kvbaton.engines.side.asks import Target
from kvbaton.engines.side.decode import DecodeSide, LoadAdmission
from kvbaton.engines.side.prefill import PrefillSide
from kvbaton.engines.side.protocols import Grouping
from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.engines.vllm.config import vllm_versions
from kvbaton.engines.vllm.content.request_content import VllmRequests, content_of, handed_position, shorten
from kvbaton.engines.vllm.memory import vllm_layout
from kvbaton.engines.vllm.memory.vllm_layout import Parallel, RankFacts, engine_layout, kind_of, rank_facts
from kvbaton.node.epochs import EpochTable
from kvbaton.node.pin_budget import PinBudget
from kvbaton.node.prompt_account import PromptTimes
from kvbaton.protocol.content import digest as content_digest
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Per
from kvbaton.protocol.geometry.plan import plan
from kvbaton.protocol.geometry.progress import Rect
from kvbaton.protocol.geometry.spans import BlockLists, SpanSide, segments
from tests.engines.vllm.memory.test_vllm_layout import Config, Storage, Tensor, spec
from tests.engines.vllm.memory.test_vllm_layout import Group as LayerGroup
from tests.engines.vllm.test_block_pool import FakePool

CONTENT, PAGE = 24, 32


def mamba(**more: Any) -> Any:
    made = {"shapes": ((3, 2),), "dtypes": ("torch.float32",), "mamba_type": "MAMBA2", "block_size": 64}
    return spec("MambaSpec", **{**made, "state_content_size_bytes": CONTENT, "num_speculative_blocks": 1, **more})


def facts(tp: int = 0, tp_size: int = 1, page: int = PAGE, content: int = CONTENT, **more: Any) -> RankFacts:
    """Two layers of states of 10 blocks, each in a page of its own."""
    storage = Storage(4096, 20 * page)
    tensors = {
        f"layers.{at}": Tensor(
            storage, (10, 1, 1, content), at * 10 * page, 1, (page, content, content, 1), "torch.int8"
        )
        for at in (0, 1)
    }
    config = Config([LayerGroup(["layers.0", "layers.1"], mamba(**more))])
    return rank_facts(tensors, config, Parallel(0, tp, tp_size, 2), opaque_pages=True)


def engine(ranks: int = 1, **more: Any) -> EngineLayout:
    return engine_layout([facts(tp, ranks, **more) for tp in range(ranks)])


class TestLayout:
    def test_a_state_is_one_opaque_piece_of_a_padded_page(self) -> None:
        [group] = engine().groups
        assert group.kind is GroupKind.STATE and group.cells == (Cell("state", CONTENT, Per.PAGE),)
        assert "MAMBA2 3x2:float32" in group.dtype and facts().groups[0].places[1].block_stride == PAGE

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_it_moves_from_a_rank_to_the_same_rank_whatever_the_padding_and_what_d_has(self, ranks: int) -> None:
        found = plan(engine(ranks), engine(ranks, page=64))
        for rank in range(ranks):
            lists = BlockLists([7], [3], tokens=1000, target_first_token=896)
            [move] = segments(found, SpanSide.TARGET, rank, Rect(0, 0, 2, 0, 1), lists)
            assert move.peer_rank == rank
            assert list(move.spans) == [3 * 64, 7 * 32, CONTENT, 640 + 3 * 64, 320 + 7 * 32, CONTENT]

    @pytest.mark.parametrize(
        ("source", "target", "named"),
        [
            ({"ranks": 2}, {}, "slices of a state, one for each tensor-parallel rank: source has 2, target has 1"),
            ({}, {"ranks": 2}, "slices of a state, one for each tensor-parallel rank: source has 1, target has 2"),
            ({}, {"dtypes": ("torch.bfloat16",)}, "dtype"),
            ({}, {"mamba_type": "GDN_ATTN"}, "dtype"),
        ],
    )
    def test_states_that_are_not_alike_are_refused_by_name(self, source: Any, target: Any, named: str) -> None:
        with pytest.raises(ProtocolError, match=named):
            plan(engine(**source), engine(**target))

    def test_a_replicated_state_fits_any_number_of_ranks(self) -> None:
        found = plan(engine(1, tp_replicated=True), engine(2, tp_replicated=True))
        assert [(part.source_rank, part.target_rank) for part in found.parts] == [(0, 0), (0, 1)]

    def test_a_cache_of_another_size_than_its_spec_says_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected 10 states of 24 bytes"):
            facts(content=16)


@pytest.mark.parametrize(("name", "why"), vllm_layout.REFUSED.items())
def test_what_is_refused_is_refused_with_its_name_and_reason(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"layers\.0") as refused:
        kind_of("layers.0", spec(name))
    assert name in str(refused.value) and why in str(refused.value)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (spec("MLAAttentionSpec", tokens_per_state=4), "tokens_per_state: 4"),
        (spec("SlidingWindowMLASpec", bounded_replay=True), "bounded_replay"),
        (spec("NewestSpec"), "NewestSpec are not handed over: this version does not know"),
    ],
)
def test_odd_ones_of_a_kind_and_unknown_kinds_are_refused_too(found: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kind_of("layers.0", found)


def hybrid(block_tokens: int = 64) -> Grouping:
    groups = (
        Group("0.full", GroupKind.FULL, 16, ("a",), 1, (Cell("kv", 8),), "float32"),
        Group("1.state", GroupKind.STATE, block_tokens, ("b",), 1, (Cell("state", 8, Per.PAGE),), "MAMBA2"),
    )
    return Grouping(EngineLayout(groups, ()), (0, 1), state_blocks=3)


class TestTables:
    def test_a_state_is_one_block_and_comes_with_the_end(self) -> None:
        found = hybrid()
        assert (found.needed(130), found.whole(130), found.first(64)) == ((9, 1), (8, 0), (4, 0))
        assert (found.stateful, found.slides) == (True, False)

    @pytest.mark.parametrize(("tokens", "state"), [(1, 5), (64, 5), (65, 6), (128, 6), (129, 7)])
    def test_it_is_the_entry_of_the_last_token(self, tokens: int, state: int) -> None:
        """Entries behind it are scratch of speculative decoding."""
        cut = hybrid().cut([list(range(20, 40)), [5, 6, 7, 8]], (0, 0), hybrid().needed(tokens), tokens)
        assert cut[1] == (state,) and hybrid().of_states(cut) == (state,)

    def test_before_the_end_there_is_none(self) -> None:
        assert hybrid().cut([[1, 2, 3], []], (0, 0), (3, 0), 40) == ((1, 2, 3), ())

    @pytest.mark.parametrize("table", [[0, 0], [5]])
    def test_a_state_that_is_not_there_is_an_error_and_no_gap(self, table: list[int]) -> None:
        with pytest.raises(ValueError, match="group 1"):
            hybrid().cut([[1] * 9, table], (0, 0), (8, 1), 128)

    def test_a_load_is_admitted_if_its_states_could_be_computed(self) -> None:
        pool = FakePool()
        room = LoadAdmission(hybrid(), PinnedPool(pool, EpochTable(8)), 16)
        loading = SimpleNamespace(request_id="r", num_tokens=32)
        room.allocated(loading, [[1, 2], [3]], loads=True)
        assert room.admits(loading) is False  # 6 blocks for one that fails, 3 more for the other; there are 8
        room.left("r")
        assert room.admits(loading)


def request(tokens: int = 100, **more: Any) -> Any:
    prompt = list(range(tokens))
    made = {"request_id": "r", "prompt_token_ids": prompt, "_all_token_ids": list(prompt), "num_prompt_tokens": tokens}
    made |= {"block_hashes": list(range(tokens // 10)), "max_tokens": 16, "num_computed_tokens": 0, "cache_salt": None}
    return SimpleNamespace(**{**made, **more})


def test_one_token_less_is_handed_over_and_of_one_nothing() -> None:
    assert [handed_position(tokens, windowed, True) for windowed in (True, False) for tokens in (1, 2, 100)] == [
        0,
        1,
        99,
    ] * 2


def test_a_shortened_request_is_one_of_fewer_tokens_and_shares_nothing_with_the_longer_one() -> None:
    prompt = request()
    before = prompt.prompt_token_ids
    shorten(prompt, 99, 10)
    assert (prompt.num_prompt_tokens, prompt.max_tokens, len(prompt.block_hashes)) == (99, 1, 9)
    assert prompt.prompt_token_ids == prompt._all_token_ids == list(range(99)) and len(before) == 100


class FakeDoor:
    """What P's half tells the node."""

    config = SimpleNamespace(me=SimpleNamespace(worker="p0"))
    budget = PinBudget()

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.times = PromptTimes(lambda: 0.0)

    def open_ticket(self, ticket: str) -> Any:
        return SimpleNamespace(handoff="h", target="", max_readers=1)

    def holder_of(self, ticket: str | None) -> str:
        return "d0"

    def begin(self, handoff: str, digest: bytes, position: int, **more: Any) -> int:
        self.told.append(("begin", digest, position))
        return 1

    def pin(self, lease: int, blocks: Any) -> tuple[int, ...]:
        self.told.append(("pin", blocks))
        return tuple(each for ids in blocks for each in ids)

    def grant(self, digest: bytes, position: int, blocks: Any, **more: Any) -> tuple[str, Any]:
        self.told.append(("grant", digest, position, blocks))
        return "ticket", ()

    def progressed(self, lease: int, progress: Any) -> None:
        self.told.append(("progressed", tuple(group.blocks_done for group in progress)))

    def completed(self, lease: int) -> None:
        self.told.append(("completed",))

    def source_ended(self, lease: int, reason: Any) -> None:
        self.told.append(("ended", str(reason)))


@pytest.fixture(name="prefill")
def prefill_of() -> Callable[[], tuple[Any, FakeDoor, EpochTable]]:
    def make() -> tuple[Any, FakeDoor, EpochTable]:
        door, epochs = FakeDoor(), EpochTable(40)
        pool = FakePool()
        pool.blocks = [SimpleNamespace(block_id=number, refs=0) for number in range(40)]
        return PrefillSide(door, PinnedPool(pool, epochs), hybrid(), VllmRequests(hybrid(), 10)), door, epochs  # type: ignore[arg-type]

    return make


Made = Callable[[], tuple[Any, FakeDoor, EpochTable]]
TABLES = [list(range(10, 20)), [5, 6, 7]]


def source(mode: Mode = Mode.PULL) -> Any:
    return SimpleNamespace(mode=mode, ticket="t", trace=None)


class TestPrefill:
    def test_p_computes_all_but_the_last_token_and_names_the_content_as_d_does(self, prefill: Made) -> None:
        p, door, _ = prefill()
        mine, whole = request(), request()
        p.accepted(mine, source())
        assert mine.num_prompt_tokens == 99 and p.shortens("r")
        mine.num_computed_tokens = 99
        assert p.finished(mine, TABLES, well=True)["ticket"] == "ticket"
        [(_, digest, position, blocks)] = door.told
        assert digest == content_digest(content_of(whole, 99)) and position == 99
        assert blocks == (tuple(range(10, 17)), (6,))

    @pytest.mark.parametrize("odd", [{"skip_reading_prefix_cache": True}, {"pooling_params": object()}])
    def test_a_prompt_that_must_be_computed_whole_is_not_shortened(self, prefill: Made, odd: Any) -> None:
        p, _, _ = prefill()
        for each in (request(**odd), request(1)):
            tokens = each.num_prompt_tokens
            p.accepted(each, source())
            assert each.num_prompt_tokens == tokens and not p.shortens("r")
            told = p.finished(each, TABLES, well=True)
            assert told["do_remote_prefill"] and TransferParams.parse(told) is None, "D takes it for a plain request"
            assert p.finished(each, TABLES, well=True) is None

    def test_states_that_have_counted_more_are_not_granted(self, prefill: Made) -> None:
        p, door, _ = prefill()
        mine = request()
        p.accepted(mine, source())
        mine.num_computed_tokens = 100
        assert p.finished(mine, TABLES, well=True) is None and not door.told

    def test_a_step_past_the_end_makes_what_was_leased_stale_before_it_runs(self, prefill: Made) -> None:
        """vLLM ends such a request after one token; if it did not, its next step would overwrite the state."""
        p, door, epochs = prefill()
        mine = request()
        p.accepted(mine, source(Mode.STREAM))
        p.begun(mine)
        for step, (before, tokens) in enumerate(((0, 64), (64, 35))):
            mine.num_computed_tokens = before
            p.scheduled(step, "r", tokens, TABLES)
            p.computed(step)
        pinned = [each[1] for each in door.told if each[0] == "pin"]
        assert pinned == [((10, 11, 12, 13), ()), ((14, 15, 16), (6,))], "the state last"
        assert door.told[-1] == ("completed",)
        noted = epochs.all_of([6, 14])
        mine.num_computed_tokens = 99
        p.scheduled(2, "r", 1, TABLES)
        assert epochs.all_of([14]) == noted[1:] and epochs.all_of([6]) != noted[:1]


def test_a_vllm_that_would_zero_what_has_arrived_is_refused_for_such_models() -> None:
    base = type("Base", (), dict.fromkeys(vllm_versions.NEEDED))
    vllm_versions.check(base)
    with pytest.raises(RuntimeError, match="get_loaded_kv_cache_group_ids, which models with states"):
        vllm_versions.check(base, stateful=True)


def test_a_model_has_states_if_a_group_that_is_handed_over_has() -> None:
    inner = type("UniformTypeKVCacheSpecs", (), {"kv_cache_specs": {"a": spec(), "b": mamba()}, "block_size": 8})()
    for group, expected in ((mamba(), True), (inner, True), (spec(), False)):
        assert vllm_layout.stateful(Config([LayerGroup(["a"], group)])) is expected
    assert not vllm_layout.stateful(Config([LayerGroup(["a"], mamba(), enable_kv_transfer=False)]))
    assert vllm_layout.state_blocks(Config([LayerGroup(["a"], mamba())])) == 3


def test_d_computes_a_prompt_of_one_token() -> None:
    told: list[tuple[str, Any]] = []
    door = SimpleNamespace(disown=lambda ticket, reason: told.append(("disown", ticket)))
    d = DecodeSide(door, SimpleNamespace(), hybrid(), VllmRequests(hybrid()), True, False)  # type: ignore[arg-type]
    one = request(1, kv_transfer_params={"do_remote_prefill": True, "mode": "pull", "ticket": "t"})
    d.accepted(one, Target(Mode.PULL, "t"))
    assert told == [("disown", "t")] and d.match(one, 0) == (0, False)


def test_layers_with_states_are_not_spoken_of_one_by_one(adapter: Callable[[str], ModuleType]) -> None:
    layers_done = adapter("worker_side").layers_done

    def group(kind: GroupKind, names: Sequence[str]) -> Any:
        return SimpleNamespace(kind=kind, layers=tuple(names))

    found = layers_done(
        SimpleNamespace(
            groups=(
                group(GroupKind.STATE, ["model.layers.0.mamba", "model.layers.2.mamba"]),
                group(GroupKind.FULL, ["model.layers.1.attn", "model.layers.3.attn"]),
            )
        )
    )
    assert found == {"model.layers.1.attn": (0, 1), "model.layers.3.attn": (0, 2)}
