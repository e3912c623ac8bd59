"""KV cache blocks: reference counts, contents, and the order in which they are reused.

Law: a block's bytes stay unchanged from the moment its last reference is dropped until `allocate` returns it, and
`allocate` raises its epoch *before* that. So a reader that noted an epoch, copied the bytes and finds the epoch
unchanged has copied the right bytes. Only the engine's thread calls the pool; any thread may read `epoch`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0
"""Stands for tokens that a sliding window has left behind; never allocated, never referenced."""

BlockKey = tuple[int, bytes]
"""(KV group, chained hash): what a full block holds."""


class OutOfBlocksError(Exception):
    """Fewer blocks are free than requested; nothing was allocated."""


class BlockPool:
    """Reference counts, a free list in least-recently-used order, and the full blocks that can be found by content."""

    def __init__(self, blocks: int) -> None:
        self.epoch = [0] * blocks  # grows by one each time the block is handed out
        self.refs = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._on_reuse: Callable[[int], None] | None = None
        self.era = 0  # rises when all that is cached is forgotten although some of it is in use

    def watch(self, on_reuse: Callable[[int], None]) -> None:
        """Call `on_reuse(block)` before a block is handed out, after its epoch was raised. One watcher per pool."""
        if self._on_reuse is not None:
            raise RuntimeError("the pool has a watcher already; share that one")
        self._on_reuse = on_reuse

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """The `count` least recently used blocks, referenced once; their contents are lost."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks requested, {len(self._free)} free of {len(self.refs) - 1}")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.epoch[block] += 1
            if self._on_reuse is not None:
                self._on_reuse(block)
            self._forget(block)
            self.refs[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each, also to free ones that still hold their content."""
        for block in blocks:
            assert block != NULL_BLOCK, "null blocks hold nothing: drop them before touch"
            if self.refs[block] == 0:
                del self._free[block]
            self.refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each; the first one named is the first to be reused."""
        for block in blocks:
            assert block != NULL_BLOCK, "null blocks are not referenced: drop them before free"
            assert self.refs[block] > 0, f"block {block} is freed more often than it was allocated"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._free[block] = None

    def unpin(self, blocks: Iterable[int]) -> None:
        """`free` by the connector's name for it: undo one `touch`; the content remains until the block is reused."""
        self.free(blocks)

    def find(self, key: BlockKey) -> int | None:
        """The block that holds `key`, free or not."""
        return self._block_of.get(key)

    def publish(self, block: int, key: BlockKey) -> None:
        """Make a full block findable by its content; where two blocks hold the same, the first is."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget_all(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while any block is referenced."""
        if any(self.refs):
            return False
        self._key_of.clear()
        self._block_of.clear()
        return True

    def forget_found(self) -> int:
        """Let no request find what is cached now, also what is referenced; how many blocks that were. What a request of
        an earlier era has must not be published any more: it may be computed on these."""
        count = len(self._key_of)
        self._key_of.clear()
        self._block_of.clear()
        self.era += 1
        self.overwritten(range(1, len(self.epoch)))
        return count

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Whoever reads what was granted of these is told that it is over."""
        for block in blocks:
            self.epoch[block] += 1
            if self._on_reuse is not None:
                self._on_reuse(block)

    def validate(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless references are exactly `held` (block to count) and the indexes agree."""
        for block, refs in enumerate(self.refs):
            assert refs == held.get(block, 0), f"block {block}: {refs} references, {held.get(block, 0)} holders"
            free = block in self._free
            assert free == (refs == 0 and block != NULL_BLOCK), f"block {block}: {refs} references, free: {free}"
        assert self._key_of == {block: key for key, block in self._block_of.items()}, "prefix cache is torn"

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]


@dataclass(slots=True)
class HashChain:
    """Hashes of a request's full blocks; each covers the salt and all tokens so far, so equal hash means equal KV."""

    block_tokens: int
    salt: str = ""
    hashes: list[bytes] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The hashes of the full blocks within the first `count` of `tokens`, which only ever grow at their end."""
        for index in range(len(self.hashes), count // self.block_tokens):
            parent = self.hashes[-1] if self.hashes else _digest(self.salt.encode())
            own = tokens[index * self.block_tokens : (index + 1) * self.block_tokens]
            self.hashes.append(_digest(parent + array("I", own).tobytes()))
        return self.hashes[: count // self.block_tokens]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
