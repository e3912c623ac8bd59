"""Tables of one request: growth, sliding windows, prefix hits."""

from __future__ import annotations

import random

import pytest

from kvbaton.engines.embedded.engine_config import KvGroup
from kvbaton.engines.embedded.memory.block_cache import BlockPool, HashChain
from kvbaton.engines.embedded.memory.block_tables import KvCache, Tables

FULL, SLIDING = KvGroup((0,), None), KvGroup((1,), 20)


def cache(*groups: KvGroup, blocks: int = 40) -> KvCache:
    return KvCache(BlockPool(blocks), groups or (FULL,), 8)


def empty(subject: KvCache) -> Tables:
    return [[] for _ in subject.groups]


def hashes(tokens: int) -> list[bytes]:
    return HashChain(8).extend(list(range(tokens)), tokens)


def test_a_table_has_a_block_for_every_started_block_of_tokens() -> None:
    subject = cache()
    tables = empty(subject)
    for tokens, blocks in ((1, 1), (8, 1), (9, 2), (9, 2), (32, 4)):
        assert subject.grow(tables, tokens, 0)
        assert len(tables[0]) == blocks
    subject.release(tables)
    assert subject.pool.free_blocks == 39


def test_groups_grow_together_or_not_at_all() -> None:
    subject = cache(FULL, SLIDING, blocks=6)
    tables = empty(subject)
    assert subject.grow(tables, 16, 0)
    assert not subject.grow(tables, 24, 15)
    assert [len(table) for table in tables] == [2, 2]
    assert subject.pool.free_blocks == 1


def test_a_window_lets_go_of_what_no_later_token_sees() -> None:
    subject = cache(FULL, SLIDING)
    tables = empty(subject)
    assert subject.grow(tables, 48, 0)
    before = list(tables[1])
    assert subject.grow(tables, 48, 27)  # token 27 sees 8 to 27
    assert tables[1] == [0, *before[1:]]
    assert subject.grow(tables, 56, 42)  # token 42 sees 23 to 42
    assert tables[1][:4] == [0, 0, before[2], before[3]]
    assert 0 not in tables[0]


def test_blocks_that_no_token_will_see_are_not_allocated() -> None:
    subject = cache(FULL, SLIDING)
    tables = empty(subject)
    assert subject.missing(tables, 80, 79) == 10 + 3
    assert subject.grow(tables, 80, 79)  # token 79 sees 60 to 79
    assert [bool(block) for block in tables[1]] == [False] * 7 + [True] * 3
    assert subject.blocks_for(80) == 20


def test_a_published_prefix_is_found_and_shared() -> None:
    subject = cache()
    tables = empty(subject)
    subject.grow(tables, 30, 0)
    subject.publish(tables, hashes(30))
    hit = subject.lookup(hashes(48))
    assert (hit.tokens, hit.tables) == (24, (tuple(tables[0][:3]),))
    other = subject.adopt(hit)
    subject.release(tables)
    assert subject.pool.free_blocks == 36
    subject.release(other)


def test_a_prefix_is_found_after_its_request_has_gone() -> None:
    subject = cache()
    tables = empty(subject)
    subject.grow(tables, 24, 0)
    subject.publish(tables, hashes(24))
    blocks = tuple(tables[0])
    subject.release(tables)
    assert subject.lookup(hashes(24)).tables == (blocks,)


def test_the_end_of_a_prefix_is_given_up_first() -> None:
    subject = cache(blocks=6)
    tables = empty(subject)
    subject.grow(tables, 24, 0)
    subject.publish(tables, hashes(24))
    subject.release(tables)
    for left in (24, 24, 24, 16, 8):
        assert subject.lookup(hashes(24)).tokens == left
        subject.pool.allocate(1)
    assert subject.lookup(hashes(24)).tokens == 0


def test_a_hit_needs_the_window_before_it_and_no_more() -> None:
    subject = cache(FULL, SLIDING)
    tables = empty(subject)
    subject.grow(tables, 64, 0)
    subject.publish(tables, hashes(64))
    hit = subject.lookup(hashes(64))  # token 64 sees 45 on: blocks 5 to 7
    assert hit.tokens == 64
    assert hit.tables == (tuple(tables[0]), (0,) * 5 + tuple(tables[1][5:]))


def test_a_hit_is_shortened_to_where_a_window_is_whole() -> None:
    subject = cache(FULL, SLIDING, blocks=17)
    tables = empty(subject)
    subject.grow(tables, 64, 0)
    subject.publish(tables, hashes(64))
    subject.pool.free([tables[1].pop(6)])  # token 64, 56 and 48 + 8 look at it
    subject.pool.allocate(1)
    assert subject.lookup(hashes(64)).tokens == 48


def test_blocks_that_a_window_has_left_can_still_be_found() -> None:
    subject = cache(FULL, SLIDING)
    tables = empty(subject)
    subject.grow(tables, 40, 0)
    subject.publish(tables, hashes(40))
    first = tables[1][0]
    subject.grow(tables, 48, 40)
    assert tables[1][0] == 0
    assert subject.lookup(hashes(8)).tables[1] == (first,)


def test_a_model_that_slides_in_all_layers_needs_only_the_window() -> None:
    subject = cache(SLIDING)
    tables = empty(subject)
    subject.grow(tables, 64, 63)
    subject.publish(tables, hashes(64))
    assert subject.lookup(hashes(64)).tokens == 64
    assert subject.lookup(hashes(56)).tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_reference_is_lost_whatever_is_done(seed: int) -> None:
    rng, subject = random.Random(seed), cache(FULL, SLIDING, blocks=24)
    live: list[tuple[Tables, int]] = []
    for _ in range(200):
        if live and rng.random() < 0.4:
            tables, at = live.pop(rng.randrange(len(live)))
            subject.release(tables)
        elif live and rng.random() < 0.6:
            index = rng.randrange(len(live))
            tables, at = live[index]
            more = at + rng.randint(1, 20)
            if subject.grow(tables, more, at):
                subject.publish(tables, hashes(more), at // 8)
                live[index] = (tables, more)
        else:
            hit = subject.lookup(hashes(rng.randint(0, 60)))
            live.append((subject.adopt(hit), hit.tokens))
        held = [block for tables, _ in live for table in tables for block in table if block]
        subject.pool.validate({block: held.count(block) for block in held})
