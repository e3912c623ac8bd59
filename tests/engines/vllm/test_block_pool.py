"""vLLM's block pool as kvbaton pins in it: whoever watches a block, a reuse is told of or not believed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.node.epochs import UNTOLD, EpochTable


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
