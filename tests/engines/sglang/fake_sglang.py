"""A fake of SGLang's two pairs of queues (`srt/disaggregation/prefill.py`, `decode.py` of 0.5.23) for the real plug-in.

What is the fake's: requests, a paged allocator without reference counts, a model whose KV is a hash of all tokens up
to it, metadata buffers, and the queues with SGLang's own strictness: a state that a queue does not expect ends it.
What is kvbaton's: everything behind a sender and a receiver. Nothing of SGLang itself runs here.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from kvbaton.engines.sglang.sender_receiver import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING_FOR_INPUT,
    BatonReceiver,
    BatonSender,
    HandoffFailed,
)

PAGE_TOKENS, PAGES, BUFFERS, ROW, SLOTS = 4, 40, 4, 8, 6
CHUNK_TOKENS = 8
METADATA = (64, 64, 512, 32)
"""Bytes a slot of each metadata buffer: tokens, counts, top log probabilities, the room."""


class Buffers:
    """Memory of one kind: some buffers of so many items."""

    def __init__(self, items: int, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.raw = [bytearray(items * size) for size in sizes]
        self.views = [memoryview(raw) for raw in self.raw]
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(raw)) for raw in self.raw]
        self.lengths = [len(raw) for raw in self.raw]

    def item(self, buffer: int, number: int) -> memoryview:
        size = self.sizes[buffer]
        return self.views[buffer][number * size : (number + 1) * size]


@dataclass
class Req:
    """What the plug-in reads of SGLang's `Req`."""

    rid: str
    origin_input_ids: array[int]
    bootstrap_room: int
    bootstrap_host: str = "127.0.0.1"
    multimodal_inputs: Any = None
    input_embeds: Any = None
    lora_id: Any = None
    extra_key: Any = None
    finished: str = ""  # "length", or the error that the client is told
    answer: str = ""
    first_token: int = -1
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    sent: int = 0  # tokens
    computed: int = 0
    poller: Any = None


class Memory:
    """A KV pool, its allocator and the metadata buffers, and what `KVArgs` says of them."""

    def __init__(self, seed: int = 0, pages: int = PAGES, buffers: int = BUFFERS) -> None:
        self.kv = Buffers(pages, [PAGE_TOKENS * ROW] * buffers)
        self.metadata = Buffers(SLOTS, METADATA)
        self.free_pages = deque(range(1, pages))  # page 0 is for padding
        self.free_slots = deque(range(SLOTS))
        self.on_free: Callable[[Sequence[int]], None] = lambda pages: None
        self.seed = seed

    def kv_args(self) -> SimpleNamespace:
        return SimpleNamespace(
            kv_data_ptrs=self.kv.addresses, kv_data_lens=self.kv.lengths, kv_item_lens=list(self.kv.sizes),
            aux_data_ptrs=self.metadata.addresses, aux_data_lens=self.metadata.lengths,
            aux_item_lens=list(self.metadata.sizes), state_types=[], page_size=PAGE_TOKENS, gpu_id=0, engine_rank=0,
            kv_cache_dtype_str="float16",
        )  # fmt: skip

    def alloc(self, tokens: int) -> list[int] | None:
        needed = -(-tokens // PAGE_TOKENS)
        if len(self.free_pages) < needed:
            return None
        return [self.free_pages.popleft() for _ in range(needed)]

    def free(self, pages: Sequence[int]) -> None:
        """As SGLang's: whoever asks next may be given them, at once."""
        self.on_free(pages)
        self.free_pages.extendleft(reversed(pages))

    def scribble(self) -> None:
        """Other requests write to every page that is free."""
        for page in self.free_pages:
            for buffer in range(len(self.kv.sizes)):
                self.kv.item(buffer, page)[:] = b"\xee" * self.kv.sizes[buffer]

    def compute(self, req: Req, upto: int) -> None:
        for position in range(req.computed, upto):
            page, place = divmod(position, PAGE_TOKENS)
            for buffer in range(len(self.kv.sizes)):
                row = _row(req.origin_input_ids[: position + 1], buffer)
                self.kv.item(buffer, req.pages[page])[place * ROW : (place + 1) * ROW] = row
        req.computed = upto

    def kv_of(self, req: Req) -> list[bytes]:
        return [
            bytes(self.kv.item(buffer, req.pages[page])[place * ROW : (place + 1) * ROW])
            for position in range(len(req.origin_input_ids))
            for page, place in [divmod(position, PAGE_TOKENS)]
            for buffer in range(len(self.kv.sizes))
        ]


def _row(tokens: Sequence[int], buffer: int) -> bytes:
    return hashlib.sha256(bytes([buffer]) + array("q", tokens).tobytes()).digest()[:ROW]


def truth(tokens: Sequence[int], buffers: int = BUFFERS) -> list[bytes]:
    """The KV of a prompt as one engine would compute it."""
    return [_row(tokens[: at + 1], buffer) for at in range(len(tokens)) for buffer in range(buffers)]


def first_token(tokens: Sequence[int]) -> int:
    return 1 + int.from_bytes(_row(tokens, 99)[:2], "little")


def poll_all(reqs: Sequence[Req], expected: Sequence[int]) -> Iterator[tuple[Req, int]]:
    """As `poll_and_all_reduce` of one rank; a queue raises at a state that it does not expect."""
    for req in list(reqs):
        state = req.poller.poll()
        if state not in expected:
            raise RuntimeError(f"unexpected poll state {state} of {req.rid}")
        yield req, state


class FakePrefill:
    """The bootstrap queue, the waiting queue with chunked prefill, and the inflight queue."""

    def __init__(self, manager: Any, memory: Memory) -> None:
        self.manager, self.memory = manager, memory
        self.bootstrap: list[Req] = []
        self.waiting: list[Req] = []
        self.inflight: list[Req] = []
        self.is_stopped = False  # the device hangs: nothing is computed

    def add(self, req: Req, *, binds: bool = True) -> None:
        req.poller = BatonSender(
            mgr=self.manager, bootstrap_addr="127.0.0.1:1", bootstrap_room=req.bootstrap_room,
            dest_tp_ranks=[0], pp_rank=0, req_has_disagg_prefill_dp_rank=False,
        )  # fmt: skip
        if binds:
            req.poller.bind(req)
        self.bootstrap.append(req)

    def abort(self, req: Req) -> None:
        if req in self.bootstrap or req in self.inflight:
            req.poller.abort()  # and what `poll` says then
        elif req in self.waiting:
            self.waiting.remove(req)
            req.poller.abort()
            self._release(req, "aborted")

    def step(self) -> None:
        for req, state in poll_all(self.bootstrap, (FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT)):
            if state == FAILED:
                self._fail(req, self.bootstrap)
            elif state == WAITING_FOR_INPUT and self.memory.free_slots:
                req.slot = self.memory.free_slots.popleft()
                req.poller.init(-(-len(req.origin_input_ids) // PAGE_TOKENS), req.slot)
                self.bootstrap.remove(req)
                self.waiting.append(req)
        self._forward()
        for req, state in poll_all(self.inflight, (FAILED, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS)):
            if state == SUCCESS:
                self.inflight.remove(req)
                req.poller.clear()
                self._release(req, "length")
            elif state == FAILED:
                self._fail(req, self.inflight)

    def _forward(self) -> None:
        """One chunk of the first request that fits."""
        if self.is_stopped or not self.waiting:
            return
        req = self.waiting[0]
        if not req.pages:
            pages = self.memory.alloc(len(req.origin_input_ids))
            if pages is None:
                return
            req.pages = pages
        upto = min(len(req.origin_input_ids), req.computed + CHUNK_TOKENS)
        self.memory.compute(req, upto)
        is_last = upto == len(req.origin_input_ids)
        if is_last:
            self._sample(req)
        pages = req.pages[req.sent // PAGE_TOKENS : -(-upto // PAGE_TOKENS)]
        req.sent = upto
        if is_last:
            self.waiting.remove(req)
            self.inflight.append(req)
        if req.poller.should_send_kv_chunk(len(pages), is_last):
            req.poller.send(pages, None, num_kv_tokens=len(pages) * PAGE_TOKENS)

    def _sample(self, req: Req) -> None:
        """`MetadataBuffers.set_buf`."""
        metadata = self.memory.metadata
        for buffer, value in ((0, first_token(req.origin_input_ids)), (3, req.bootstrap_room)):
            metadata.item(buffer, req.slot)[:8] = value.to_bytes(8, "little")
        metadata.item(2, req.slot)[:] = bytes(METADATA[2] - 5) + b"top-5"

    def _fail(self, req: Req, queue: list[Req]) -> None:
        queue.remove(req)
        try:
            req.poller.failure_exception()
        except HandoffFailed as error:
            self._release(req, str(error))

    def _release(self, req: Req, why: str) -> None:
        """`release_kv_cache` and `maybe_release_metadata_buffer`."""
        req.finished = why
        if req.pages:
            self.memory.free(req.pages)
            req.pages = []
        if req.slot >= 0:
            self.memory.free_slots.append(req.slot)
            req.slot = -1


class FakeDecode:
    """The preallocation queue and the transfer queue."""

    def __init__(self, manager: Any, memory: Memory) -> None:
        self.manager, self.memory = manager, memory
        self.prealloc: list[Req] = []
        self.transfer: list[Req] = []
        self.is_full = False

    def add(self, req: Req, *, binds: bool = True, address: str = "p") -> None:
        req.poller = BatonReceiver(mgr=self.manager, bootstrap_addr=address, bootstrap_room=req.bootstrap_room)
        if binds:
            req.poller.bind(req)
        req.poller.init(0)
        self.prealloc.append(req)

    def abort(self, req: Req) -> None:
        req.poller.abort()

    def step(self) -> None:
        for req, state in poll_all(self.prealloc, (FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT)):
            if state == FAILED:
                self._fail(req, self.prealloc)
            elif state == WAITING_FOR_INPUT and self.memory.free_slots and not self.is_full:
                pages = self.memory.alloc(len(req.origin_input_ids))
                if pages is not None:
                    req.pages, req.slot = pages, self.memory.free_slots.popleft()
                    req.poller.send_metadata(pages, req.slot, None, decode_prefix_len=0)
                    self.prealloc.remove(req)
                    self.transfer.append(req)
        for req, state in poll_all(self.transfer, (FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS)):
            if state == SUCCESS:
                self._commit(req)
            elif state == FAILED:
                self._fail(req, self.transfer)

    def _commit(self, req: Req) -> None:
        """`_commit_transfer_to_req`, and a decode step that reads all KV; then the request is over."""
        self.transfer.remove(req)
        metadata = self.memory.metadata
        values = [int.from_bytes(metadata.item(buffer, req.slot)[:8], "little") for buffer in (0, 3)]
        req.first_token = values[0]
        if values[1] != req.bootstrap_room:
            self._release(req, f"context corruption: room {values[1]}")
            return
        assert bytes(metadata.item(2, req.slot)[-5:]) == b"top-5"
        is_right = self.memory.kv_of(req) == truth(req.origin_input_ids, len(self.memory.kv.sizes))
        req.answer = "right" if is_right else "WRONG"
        self._release(req, "length")

    def _fail(self, req: Req, queue: list[Req]) -> None:
        queue.remove(req)
        try:
            req.poller.failure_exception()
        except HandoffFailed as error:
            self._release(req, str(error))

    def _release(self, req: Req, why: str) -> None:
        req.finished = why
        req.poller.clear()
        if req.pages:
            self.memory.free(req.pages)
            req.pages = []
        if req.slot >= 0:
            self.memory.metadata.item(3, req.slot)[:] = bytes(METADATA[3])  # `clear_slot`
            self.memory.free_slots.append(req.slot)
            req.slot = -1


_numbers = count(1)


def prompt_pair(length: int, seed: int = 1, *, room: int = 0) -> tuple[Req, Req]:
    """The two legs of one request, as a router sends them off."""
    tokens = array("q", range(seed, seed + length))
    room = room or (next(_numbers) << 40) + 7
    return Req(f"p-{room:x}", tokens, room), Req(f"d-{room:x}", array("q", tokens), room)
