"""Promises 1 and 3: a block is reused only after its epoch was raised, and never while anyone holds it."""

from __future__ import annotations

import random

import pytest

from kvbaton.engines.embedded.memory.block_cache import BlockPool, HashChain, OutOfBlocksError


def test_a_pool_hands_out_each_block_but_the_null_block() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.free_blocks == 0


def test_a_pool_that_has_too_few_hands_out_none() -> None:
    pool = BlockPool(5)
    with pytest.raises(OutOfBlocksError, match="5 blocks requested, 4 free of 4"):
        pool.allocate(5)
    assert pool.free_blocks == 4
    assert pool.epoch == [0] * 5


def test_blocks_are_reused_in_the_order_they_were_freed() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    pool.free([blocks[2], blocks[0]])
    pool.unpin([blocks[3], blocks[1]])
    assert pool.allocate(4) == [blocks[2], blocks[0], blocks[3], blocks[1]]


def test_the_epoch_is_raised_before_a_block_is_handed_out() -> None:
    pool = BlockPool(4)
    seen: list[tuple[int, int, int]] = []
    pool.watch(lambda block: seen.append((block, pool.epoch[block], pool.refs[block])))
    (block,) = pool.allocate(1)
    pool.free([block])
    pool.allocate(3)
    assert [entry for entry in seen if entry[0] == block] == [(block, 1, 0), (block, 2, 0)]


def test_the_epoch_is_raised_before_a_cached_prefix_is_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, (0, b"x"))
    pool.free([block])
    found: list[int | None] = []
    pool.watch(lambda _: found.append(pool.find((0, b"x"))))
    pool.allocate(1)
    assert found == [block]
    assert pool.find((0, b"x")) is None


def test_freeing_and_touching_raise_no_epoch() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    before = list(pool.epoch)
    pool.free(blocks)
    pool.touch(blocks)
    pool.touch(blocks)
    pool.unpin(blocks)
    assert pool.epoch == before
    pool.validate(dict.fromkeys(blocks, 1))


def test_a_pinned_block_outlives_its_request() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.free([block])
    assert pool.allocate(1) != [block]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    pool.unpin([block])
    assert pool.allocate(1) == [block]


def test_a_pool_has_one_watcher() -> None:
    pool = BlockPool(3)
    pool.watch(lambda _: None)
    with pytest.raises(RuntimeError, match="watcher"):
        pool.watch(lambda _: None)


def test_null_blocks_and_double_frees_are_the_callers_fault() -> None:
    pool = BlockPool(3)
    for call in (pool.touch, pool.free, pool.unpin):
        with pytest.raises(AssertionError, match="null blocks"):
            call([0])
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.free(blocks)


def test_the_first_block_with_a_content_is_the_one_found() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, (0, b"x"))
    pool.publish(second, (0, b"x"))
    pool.publish(first, (0, b"y"))
    assert pool.find((0, b"x")) == first
    assert pool.find((0, b"y")) is None
    assert pool.find((1, b"x")) is None


def test_a_lost_reference_is_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.validate({})
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pool.validate({blocks[0]: 2})


@pytest.mark.parametrize("seed", range(20))
def test_the_books_agree_whatever_is_done(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(12)
    held: list[int] = []
    for turn in range(300):
        deed = rng.choice(("allocate", "touch", "free", "publish"))
        if deed == "allocate" and pool.free_blocks:
            held += pool.allocate(rng.randint(1, pool.free_blocks))
        elif deed == "touch":
            block = rng.randrange(1, 12)
            pool.touch([block])
            held.append(block)
        elif deed == "free" and held:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif deed == "publish" and held:
            pool.publish(rng.choice(held), (turn % 2, bytes([rng.randrange(9)])))
        pool.validate({block: held.count(block) for block in held})


def test_a_hash_covers_all_tokens_before_it_and_the_salt() -> None:
    tokens = list(range(32))
    plain = HashChain(8).extend(tokens, 32)
    assert len(plain) == len(set(plain)) == 4
    assert HashChain(8).extend([99, *tokens[1:]], 32)[3] != plain[3]
    assert not set(HashChain(8, "salt").extend(tokens, 32)) & set(plain)
    assert HashChain(8).extend([*tokens[:31], 99], 32)[:3] == plain[:3]


def test_a_hash_chain_grows_with_full_blocks_only() -> None:
    chain, tokens = HashChain(8), list(range(40))
    assert chain.extend(tokens, 7) == []
    assert len(chain.extend(tokens, 23)) == 2
    assert chain.extend(tokens, 40) == HashChain(8).extend(tokens, 40)
    assert len(chain.extend(tokens, 16)) == 2
