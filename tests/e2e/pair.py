"""Two workers in one process, without registry and router: the shortest way to a real handoff."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvbaton.api.params import Mode, TransferParams, source_params, target_params
from kvbaton.control import keyring
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker
from kvbaton.engines.embedded.engine_config import EngineConfig
from kvbaton.engines.embedded.http_worker import Token
from kvbaton.engines.embedded.server_plan import GenerateRequest
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.protocol.events import Departed
from kvbaton.protocol.ids import TransferId, WorkerId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal

REST_S = 20.0


@dataclass
class Pair:
    """A prefill and a decode worker that know each other."""

    p: EmbeddedWorker
    d: EmbeddedWorker
    key: bytes
    names: tuple[str, str] = ("p0", "d0")

    def ticket(self) -> str:
        source, target = self.names
        handoff = handoff_id(TransferId(secrets.token_hex(16)))
        return seal(Ticket(handoff, WorkerId(source), time.time() + 60, target=WorkerId(target)), self.key)

    async def answer(self, prompt: str, mode: str, max_tokens: int = 12) -> str:
        """What the client gets for `prompt` when it is handed over in `mode`."""
        if mode == "pull":
            return await self.decode(prompt, await self.prefill(prompt), max_tokens)
        ticket = self.ticket()
        source = TransferParams.parse(source_params(Mode(mode), ticket))
        target = TransferParams.parse(target_params(Mode(mode), ticket))
        _, text = await asyncio.gather(
            generate(self.p, prompt, 1, source), generate(self.d, prompt, max_tokens, target)
        )
        return text[0]

    async def prefill(self, prompt: str) -> TransferParams:
        """Compute at P; gives what D needs."""
        _, params = await generate(self.p, prompt, 1, TransferParams(do_remote_decode=True))
        parsed = TransferParams.parse(params)
        assert parsed is not None
        return parsed

    async def decode(self, prompt: str, params: TransferParams | None, max_tokens: int = 12) -> str:
        return (await generate(self.d, prompt, max_tokens, params))[0]

    async def at_rest(self) -> None:
        """Wait until nobody holds anything for anybody; AssertionError when that takes too long."""
        deadline = time.monotonic() + REST_S
        while time.monotonic() < deadline:
            if all(idle(worker) for worker in (self.p, self.d)):
                for worker in (self.p, self.d):
                    worker.engine.validate()
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not at rest: {self.p.stats()} {self.d.stats()}")

    def ends(self) -> dict[str, int]:
        return dict(self.d.stats()["ends_total"])

    async def lose_sight(self, *, both: bool = True) -> None:
        """D no longer sees P, nor P D, and each knows it: what is asked from now on comes after that."""
        told = [(self.d, self.p.node.peer), *([(self.p, self.d.node.peer)] if both else [])]
        for worker, peer in told:
            worker.node.loop.tell(Departed(peer.worker, peer.incarnation))
        for worker, _ in told:
            for _turn in range(2):  # a call may be answered in the turn before
                await asyncio.wrap_future(worker.node.loop.call(lambda: None))


def idle(worker: EmbeddedWorker) -> bool:
    stats = worker.stats()
    held = ("pins", "leases", "intakes", "running", "waiting", "loading")
    return all(stats[name] == 0 for name in held) and stats["free_blocks"] == stats["blocks"]


@contextlib.asynccontextmanager
async def pair(
    tmp_path: object,
    *,
    transport: str = "auto",
    configs: Sequence[EngineConfig | None] = (None, None),
    p: dict[str, object] | None = None,
    d: dict[str, object] | None = None,
) -> AsyncIterator[Pair]:
    directory = f"{tmp_path}/keys"
    keyring.mint(directory, ["p0", "d0"])
    rings = keyring.load(directory, "p0"), keyring.load(directory, "d0")
    workers = []
    for ring, role, options, config in zip(rings, ("prefill", "decode"), (p or {}, d or {}), configs, strict=True):
        base = {"registry": "tcp://127.0.0.1:1", "transport": transport, "keys": directory, "name": ring.name}
        workers.append(EmbeddedWorker(WorkerOptions(**{**base, "role": role, **options}), ring, config))
    try:
        for worker in workers:
            worker.start()
            worker.node.know({each.node.peer.worker: each.node.address for each in workers})
        yield Pair(*workers, rings[0].ticket_keys[0])
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.stop)


async def generate(worker: EmbeddedWorker, prompt: str, max_tokens: int, params: TransferParams | None):
    """The text of an answer, and what it says about the KV."""
    text, extra = "", None
    request = GenerateRequest(
        request_id=secrets.token_hex(8),
        prompt=tuple(tokenizer.encode(prompt)),
        max_tokens=max_tokens,
        temperature=0.0,
        handoff=params,
    )
    async for event in worker.backend.generate(request):
        if isinstance(event, Token):
            text += event.text
        else:
            extra = event.kv_transfer_params
    return text, dict(extra) if extra is not None else None
