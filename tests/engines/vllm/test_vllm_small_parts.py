"""The adapter's small parts: the pool, block tables, the guard, the content of a request, the compatibility key."""

from __future__ import annotations

import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.control.address_book import AddressBook
from kvbaton.engines.side import guard
from kvbaton.engines.side.grouping import Grouping, real
from kvbaton.engines.vllm import interpreter
from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.engines.vllm.content import request_content as content
from kvbaton.engines.vllm.content.request_content import handed_position
from kvbaton.engines.vllm.content.vllm_compat import config_digest, weights_digest
from kvbaton.node.epochs import UNTOLD, EpochTable
from kvbaton.protocol.content import digest as content_digest
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind


class FakePool:
    """As much of vLLM's BlockPool as is used."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number, refs=0) for number in range(8)]
        self._reuse_watchers: dict[int, Any] = {}

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.refs += 1

    def get_num_free_blocks(self) -> int:
        return sum(block.refs == 0 for block in self.blocks)

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.refs -= 1

    def unpin_blocks(self, blocks: list[Any], on_reuse: Any) -> None:
        self.free_blocks(blocks)
        self._reuse_watchers.update({block.block_id: on_reuse for block in blocks})

    def reuse(self, *ids: int) -> None:
        for each in ids:
            watcher = self._reuse_watchers.pop(each, None)
            if watcher is not None:
                watcher(self.blocks[each])


class TestPool:
    def test_a_release_arms_the_epochs_and_reuse_raises_them(self) -> None:
        fake, epochs = FakePool(), EpochTable(8)
        pool = PinnedPool(fake, epochs)
        pool.touch([3, 4])
        pool.unpin([3, 4])
        assert pool.exact and fake.blocks[3].refs == 0
        fake.reuse(3)
        assert (epochs.all_of([3])[0], epochs.all_of([4])[0]) == (1, 0)
        assert (epochs.all_judged([3])[0], epochs.all_judged([4])[0]) == (1, 0)
        fake._reuse_watchers[4](object())  # whatever it is told, it must not raise: it runs inside schedule()

    def test_a_reuse_that_another_watcher_is_told_of_is_judged_as_one(self) -> None:
        """Promise 1, rule 7: vLLM keeps one watcher per block, and whoever unpins it next takes its place."""
        fake, epochs, told = FakePool(), EpochTable(8), list[int]()
        pool = PinnedPool(fake, epochs)
        pool.touch([3, 4])
        noted = epochs.all_of([3])[0]
        pool.unpin([3, 4])
        fake.unpin_blocks([fake.blocks[3]], lambda block: told.append(block.block_id))
        assert (epochs.all_judged([3])[0], epochs.all_judged([4])[0]) == (UNTOLD, 0), "nobody would tell us of block 3"
        fake.reuse(3, 4)
        assert (epochs.all_judged([3])[0], epochs.all_judged([4])[0], told) == (UNTOLD, 1, [3])
        pool.touch([3])  # and released again: the watcher is ours, the epoch another
        pool.unpin([3])
        assert epochs.all_judged([3])[0] == epochs.all_of([3])[0] != noted

    def test_a_pinned_block_is_believed_whoever_else_watches_it(self) -> None:
        fake, epochs = FakePool(), EpochTable(8)
        pool = PinnedPool(fake, epochs)
        for _ in range(2):
            pool.touch([3])
            fake.unpin_blocks([fake.blocks[3]], print)
            assert epochs.all_judged([3])[0] == 0, "what is pinned is not reused"
            pool.unpin([3])
            assert epochs.all_judged([3])[0] == 0

    def test_we_take_the_place_of_no_other_watcher(self) -> None:
        """HiSparse reads blocks that it has let go of until it is told: it must be told."""
        fake, epochs, told = FakePool(), EpochTable(8), list[str]()
        ours, second = PinnedPool(fake, epochs), PinnedPool(fake, other := EpochTable(8))
        fake.unpin_blocks([fake.blocks[3]], lambda block: told.append("theirs"))
        for _ in range(50):  # two connectors of ours in one engine: neither takes the other's place, and no chain grows
            for pool in (ours, second):
                pool.touch([2, 3])
                pool.unpin([2, 3])
        assert len(fake._reuse_watchers[3].each) == 3
        fake.reuse(2, 3)
        assert told == ["theirs"] and {*epochs.all_of([3]), *other.all_of([3])} == {1}
        assert {*epochs.all_of([2]), *other.all_of([2])} == {1}

    def test_a_pool_whose_watchers_cannot_be_seen_is_not_exact(self) -> None:
        fake = FakePool()
        del fake._reuse_watchers
        fake.unpin_blocks = lambda blocks, on_reuse: fake.free_blocks(blocks)  # type: ignore[method-assign]
        pool = PinnedPool(fake, epochs := EpochTable(8))
        pool.touch([3])
        pool.unpin([3])
        pool.touch([3])
        assert not pool.exact and epochs.all_judged([3])[0] == 0

    def test_without_unpin_blocks_nothing_is_exact(self) -> None:
        older = SimpleNamespace(blocks=FakePool().blocks, touch=print, free_blocks=print, get_num_free_blocks=len)
        pool = PinnedPool(older, EpochTable(8))
        assert not pool.exact
        pool.unpin([1])

    def test_without_touch_start_up_is_refused_by_name(self) -> None:
        with pytest.raises(RuntimeError, match="BlockPool has no touch"):
            PinnedPool(SimpleNamespace(blocks=[]), EpochTable(1))


def grouping() -> Grouping:
    groups = (
        Group("0.full", GroupKind.FULL, 16, ("a",), 1, (Cell("kv", 8),), "float32"),
        Group("1.sliding", GroupKind.SLIDING, 8, ("b",), 1, (Cell("kv", 8),), "float32", window=16),
    )
    return Grouping(EngineLayout(groups, ()), (0, 1))


def test_tables_are_cut_per_group_and_null_blocks_are_never_touched() -> None:
    found = grouping()
    assert (found.needed(17), found.whole(17), found.slides) == ((2, 3), (1, 0), True)
    cut = found.cut([[5, 6, 9], [0, 7, 8]], (0, 0), found.needed(17))
    assert cut == ((5, 6), (-1, 7, 8)) and real(cut) == (5, 6, 7, 8)
    with pytest.raises(ValueError, match="group 1: 1 blocks in the table, 3 needed"):
        found.cut([[5, 6], [7]], (0, 0), (2, 3))


def test_behind_a_window_one_token_less_is_handed_over() -> None:
    assert [handed_position(tokens, True) for tokens in (1, 2, 100)] == [1, 1, 99]
    assert [handed_position(tokens, False) for tokens in (1, 2, 100)] == [1, 2, 100]


numbers = count()


def request(**changes: Any) -> Any:
    base = {
        "request_id": f"r{next(numbers)}",
        "prompt_token_ids": [1, 2, 3],
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**base, **changes})


def digest_of(of: Any, position: int = 3) -> bytes:
    """As the hooks get it: asked for until it is known."""
    until = time.monotonic() + 60
    while not content.is_known(of):
        assert time.monotonic() < until
        time.sleep(0.001)
    return content_digest(content.content_of(of, position))


def image(identifier: str, offset: int = 1) -> Any:
    place = SimpleNamespace(offset=offset, length=4)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)


def test_whatever_shapes_the_kv_is_in_the_digest() -> None:
    """Promise 1, rule 2: a genuine ticket with any other content is refused."""
    others = [
        request(prompt_token_ids=[1, 2, 4]),
        request(prompt_token_ids=[1, 2]),
        request(cache_salt="s"),
        request(lora_request=SimpleNamespace(lora_name="l", lora_int_id=1, lora_path="/nowhere/1")),
        request(lora_request=SimpleNamespace(lora_name="l", lora_int_id=2, lora_path="/nowhere/2")),
        request(mm_features=[image("a")]),
        request(mm_features=[image("b")]),
        request(mm_features=[image("a", offset=2)]),
    ]
    digests = [digest_of(each) for each in (request(), *others)] + [digest_of(request(), 2)]
    assert len(set(digests)) == len(digests)
    assert digest_of(request()) == digest_of(request())


def test_a_turn_is_of_the_pictures_in_it_in_whatever_order_they_are_told() -> None:
    """Promise 1: the same words around another picture are another conversation."""
    cat, dog, later = image("cat", 1), image("dog", 1), image("later", 5)
    shown = [[cat], [dog], [cat, later], [later, cat], [later, dog], [later]]
    told = (request(mm_features=each, all_token_ids=[1, 2, 3, 4, 5, 6]) for each in shown)
    found = [content.turn_content(each, 4) for each in told]
    assert found[0] == found[2] == found[3] and found[1] == found[4]
    assert found[2] != found[4] != found[5] != found[0]


class TestGuard:
    def test_nothing_leaves_a_hook_and_the_fallback_answers(self) -> None:
        @guard.guarded(lambda given: ("fallback", given))
        def hook(given: int) -> tuple[str, int]:
            raise KeyError(given)

        before = guard.faults["hook"]
        assert hook(5) == ("fallback", 5) and guard.faults["hook"] == before + 1

    def test_fallbacks_are_not_shared(self) -> None:
        made = guard.makes(set)
        assert made() is not made() and guard.returns(7)(1, two=2) == 7


class TestCompat:
    def weights(self, directory: Path, content: bytes) -> str:
        directory.mkdir()
        header = b'{"a":1}'
        (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
        return weights_digest(str(directory), None)

    def test_the_same_weights_elsewhere_are_the_same_and_others_are_not(self, tmp_path: Path) -> None:
        plain = self.weights(tmp_path / "a", b"x" * 1_000_000)
        assert self.weights(tmp_path / "b", b"x" * 1_000_000) == plain
        assert self.weights(tmp_path / "c", b"x" * 999_999 + b"y") != plain
        assert self.weights(tmp_path / "d", b"x" * 999_999) != plain

    def test_a_single_file_is_known_by_its_content_too(self, tmp_path: Path) -> None:
        for name, data in (("a.gguf", b"x" * 9000), ("b.gguf", b"x" * 9000), ("c.gguf", b"y" * 9000)):
            (tmp_path / name).write_bytes(data)
        first, second, third = (weights_digest(str(tmp_path / f"{name}.gguf"), None) for name in "abc")
        assert first == second != third

    def test_a_name_alone_stands_for_no_weights(self) -> None:
        """Promise 1: two hosts may have cached different weights under one name of a hub."""
        with pytest.raises(ValueError, match="model_id: missing"):
            weights_digest("nobody/has-this-model", "main")

    def test_paths_and_versions_do_not_matter_and_numbers_do(self) -> None:
        def digest(**fields: Any) -> str:
            return config_digest(SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "rope": {"theta": 1.0}, **fields}))

        assert digest(_name_or_path="/a", transformers_version="1") == digest(_name_or_path="/b")
        assert digest(hidden_size=9) != digest() != digest(rope={"theta": 2.0})


def test_addresses_lead_to_workers_however_they_are_written() -> None:
    book = AddressBook()
    book.replace({"p0": "tcp://127.0.0.1:7100", "d0": "tcp://[::1]:7200"})
    assert (book.at("127.0.0.1", 7100), book.at("0:0:0:0:0:0:0:1", 7200), book.at("[::1]", 7200)) == ("p0", "d0", "d0")
    assert book.at("127.0.0.1", 7101) is None and book.at("10.0.0.1", 7100) is None


def test_threads_give_way_soon_and_never_later_than_the_operator_said() -> None:
    before = sys.getswitchinterval()
    try:
        for had, has in ((0.005, interpreter.SWITCH_S), (0.0001, 0.0001)):
            sys.setswitchinterval(had)
            interpreter.share()
            assert sys.getswitchinterval() == pytest.approx(has, abs=2e-6)
    finally:
        sys.setswitchinterval(before)
