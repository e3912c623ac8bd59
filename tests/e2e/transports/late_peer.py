"""Two ends of a handoff without an engine between them and the data plane: a source that can be stopped, and a reader.

Run as `python late_peer.py KEYS PLANE` it is the source: a whole node with leased blocks, which carries out calls from
standard input, one JSON line each. The reader runs in the test's process, where its memory can be looked at.

Law: a source that was stopped goes on before anything of its reader is closed (see the hazard in
`transports/nixl/nixl_transport.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.control import keyring as keys
from kvbaton.node.cluster_node import ClusterNode, ClusterSettings, EngineFacts, make_doorway, new_life
from kvbaton.node.doorway import DropBlocks, LoadReport, MatchState
from kvbaton.protocol.effects import End
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Rank, Share, places, planes
from kvbaton.protocol.ids import RequestId, WorkerId, rank_peer
from kvbaton.protocol.settings import Settings
from kvbaton.transports.catalogue import PlaneSettings, make
from kvbaton.transports.core.shared_memory import allocate

BLOCKS = 1152
BLOCK_TOKENS = 16
LAYERS = 4
PAGE_BYTES = 32 << 10
"""144 MiB in all: a read of most of it takes long enough to be caught half-way."""

SETTINGS = Settings(transfer_timeout=1.5, claim_timeout=4.0, revoke_timeout=0.5, retry_s=0.25)
ANSWER_S = 30.0
END_S = 10.0

Pages = npt.NDArray[np.uint8]  # by layer and block


def contents(blocks: Sequence[int]) -> Pages:
    """What the source has in these blocks: different in each, and in each layer; every byte is 1 to 127."""
    pages = np.empty((LAYERS, len(blocks), PAGE_BYTES), np.uint8)
    pages[:] = (np.arange(PAGE_BYTES) % 97 + 1).astype(np.uint8)
    pages[:, :, 0] = np.arange(1, LAYERS + 1)[:, None]
    pages[:, :, 1] = np.array(blocks) // 100 + 1
    pages[:, :, 2] = np.array(blocks) % 100 + 1
    return pages


def _layout() -> EngineLayout:
    cell = Cell("kv", PAGE_BYTES // BLOCK_TOKENS)
    group = Group("full", GroupKind.FULL, BLOCK_TOKENS, tuple(map(str, range(LAYERS))), 1, (cell,), "bytes")
    stride = BLOCKS * PAGE_BYTES
    share = Share(0, 1, BLOCKS, places(range(LAYERS), 0, stride, PAGE_BYTES), planes("PHN", (cell,), 1, BLOCK_TOKENS))
    return EngineLayout((group,), (Rank(0, 0, 0, (LAYERS * stride,), (share,)),))


class Side:
    """One node with memory and a door, and nobody who computes."""

    def __init__(self, name: str, directory: str, plane: str) -> None:
        keyring = keys.load(directory, name)
        facts = EngineFacts(me=new_life(name), role="both", blocks=BLOCKS, layout=_layout(), compat={"model": "none"})
        self.region = allocate(LAYERS * BLOCKS * PAGE_BYTES)
        self.news = threading.Event()
        self.door = make_doorway(facts, keyring, ticket_ttl_s=600.0)
        self.door.wake_engine = self.news.set
        transport = make(plane, rank_peer(facts.me, 0), PlaneSettings(), [self.region.view])
        settings = ClusterSettings(protocol=SETTINGS, records=False)
        self.node = ClusterNode(facts, keyring, [{plane: transport}], self.door, settings)
        self.node.start()

    @property
    def pages(self) -> Pages:
        return np.frombuffer(self.region.view, np.uint8).reshape(LAYERS, BLOCKS, PAGE_BYTES)

    def close(self) -> None:
        self.node.stop(END_S)
        assert not self.node.loop.is_alive, "the node did not end"
        self.region.close()


# --- the source, in a process of its own


class Grant(msgspec.Struct, tag=True):
    """Lease these blocks as one prompt; the answer is its ticket."""

    digest: bytes
    blocks: list[int]


class Pinned(msgspec.Struct, tag=True):
    """How many blocks are pinned."""


Call = Grant | Pinned


def serve(directory: str, plane: str) -> None:
    side = Side("p", directory, plane)
    side.pages[:] = contents(range(BLOCKS))
    _say(side.node.address)
    for line in sys.stdin:
        side.door.duties()
        call = msgspec.json.decode(line, type=Call)
        if isinstance(call, Grant):
            blocks = (tuple(call.blocks),)
            _say(side.door.grant(call.digest, len(call.blocks) * BLOCK_TOKENS, blocks)[0])
        else:
            _say(side.door.pinned_blocks)
    side.close()


def _say(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


class Source:
    """The source's process, as the test sees it."""

    def __init__(self, directory: str, plane: str, log: Path) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, __file__, directory, plane],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, bufsize=0,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        self._read = b""
        self.address = msgspec.convert(self._answer(), tuple[str, str])

    def grant(self, digest: bytes, blocks: Sequence[int]) -> str:
        return str(self._call(Grant(digest, list(blocks))))

    def pinned(self) -> int:
        return int(self._call(Pinned()))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # a busy machine takes a while to stop the last thread

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> int:
        """Its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(END_S)

    def _call(self, call: Call) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(call) + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            assert data, f"the source does not answer:\n{self.log.read_text()[-2000:]}"
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return msgspec.json.decode(line)


# --- the reader, in the test's process


class Reader:
    """What an engine keeps of its loads: who was reported, and which blocks it does not get back yet."""

    def __init__(self, directory: str, plane: str, source: tuple[str, str]) -> None:
        self.side = Side("d", directory, plane)
        self.side.node.know({WorkerId("p"): source})
        self.pages = self.side.pages
        self.reports: dict[RequestId, list[End]] = {}
        self.held: dict[RequestId, tuple[int, ...]] = {}

    @property
    def quarantined(self) -> int:
        """The gauge that an operator sees."""
        return self.side.node.ledger.consumer.quarantined_blocks

    @property
    def free(self) -> list[int]:
        """Blocks that the engine may give to anybody."""
        return sorted(set(range(BLOCKS)).difference(*self.held.values()))

    def claim(self, source: Source, blocks: Sequence[int], *, push: bool = False) -> RequestId:
        """Lease these blocks of the source, and wait until it has granted them to us."""
        request, digest = RequestId(secrets.token_hex(8)), secrets.token_bytes(16)
        self.side.door.want(request, source.grant(digest, blocks), digest, len(blocks) * BLOCK_TOKENS, push=push)

        def found() -> bool:
            match = self.side.door.match(request)
            assert match.state is not MatchState.FAILED, match.end
            return match.state is MatchState.FOUND

        self.until(found)
        return request

    def load(self, request: RequestId, blocks: Sequence[int]) -> None:
        """Begin to take it into these blocks."""
        self.held[request] = self.side.door.allocated(request, (tuple(blocks),), 0)

    def end_of(self, request: RequestId) -> End:
        self.until(lambda: request in self.reports)
        (end,) = self.reports[request]
        return end

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + ANSWER_S
        while True:
            self._turn()
            if condition():
                return
            assert time.monotonic() < deadline, f"not within {ANSWER_S} s"
            self.side.news.wait(0.02)
            self.side.news.clear()

    def _turn(self) -> None:
        for duty in self.side.door.duties():
            if isinstance(duty, LoadReport):
                self.reports.setdefault(duty.request, []).append(duty.end)
            elif isinstance(duty, DropBlocks):
                assert self.held.pop(duty.request) == duty.blocks

    def close(self) -> None:
        del self.pages
        self.side.close()


@contextlib.contextmanager
def source_and_reader(directory: Path, plane: str) -> Iterator[tuple[Source, Reader]]:
    """Both, which know each other; the source must end well."""
    keys.mint(directory / "keys", ["p", "d"])
    source = Source(str(directory / "keys"), plane, directory / "source.log")
    status = None
    try:
        reader = Reader(str(directory / "keys"), plane, source.address)
        try:
            yield source, reader
        finally:
            source.go_on()
            try:
                reader.until(lambda: not reader.held)
            finally:
                reader.close()
    finally:
        status = source.close()
    assert status == 0, f"the source ended with {status}:\n{source.log.read_text()[-2000:]}"


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
