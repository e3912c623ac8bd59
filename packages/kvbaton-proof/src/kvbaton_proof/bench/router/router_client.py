"""The clients of a router that is measured: as many as are asked for, in one process, each with one request at a time.

Law: an order on standard input, its outcome on standard output, a line each, until standard input ends.
"""

from __future__ import annotations

import asyncio
import gc

from kvbaton_proof.bench.kit.piped_children import Parent
from kvbaton_proof.bench.router.router_backends import HOST
from kvbaton_proof.bench.router.router_load import Answer, Load, Order, Outcome
from kvbaton_proof.bench.router.router_rows import percentile

GATHER_S = 30.0  # for all streams to be open at once


async def carry_out(order: Order) -> Outcome:
    load = Load(order)
    if order.hold_port is not None:
        return await _all_open(load, order, order.hold_port)
    await load.connect()
    await load.measure()
    await load.stop(order.drain_s)
    window = load.window
    return Outcome(
        asked=load.asked, answered=len(window.latencies_s), errors=dict(load.errors), used=window.used,
        p50_ms=percentile(window.latencies_s, 0.5, 1e3), p99_ms=percentile(window.latencies_s, 0.99, 1e3),
        first_byte_p50_ms=percentile(window.first_bytes_s, 0.5, 1e3) if order.stream else None,
    )  # fmt: skip


async def _all_open(load: Load, order: Order, hold_port: int) -> Outcome:
    """Every stream is begun while D gives each its first event only; when all have it, D goes on."""
    await get(hold_port, "/hold")
    try:
        await load.connect()
        load.is_asking = False  # one stream each
        await load.until(lambda: load.started >= order.concurrency or bool(load.errors), GATHER_S)
        open_at_once = load.under_way if load.started >= order.concurrency else load.started
    finally:
        await get(hold_port, "/release")
    await load.stop(order.drain_s)
    return Outcome(asked=load.asked, answered=load.answered, errors=dict(load.errors), open_at_once=open_at_once)


async def get(port: int, path: str, within_s: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a small answer that is asked for once."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
            answer = Answer()
            while not answer.feed(data := await reader.read(1 << 16)):
                if not data:
                    raise ConnectionResetError(f"no whole answer to GET {path}")
        finally:
            writer.close()
    head, _, body = answer.data.partition(b"\r\n\r\n")
    return int(head[9:12]), body


def main() -> None:
    """Orders until standard input ends."""
    import uvloop

    parent = Parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for order in parent.questions(Order):
            gc.collect()
            gc.disable()  # a collection within the window would be told as the router's latency
            outcome = runner.run(carry_out(order))
            gc.enable()
            parent.answer(outcome)


if __name__ == "__main__":
    main()
