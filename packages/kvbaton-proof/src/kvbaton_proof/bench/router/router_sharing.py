"""What a router of several processes knows of prefixes and load, beside one of one process, over the same workers.

    python -m kvbaton_proof.bench.router.router_sharing --processes 1,2,4

Laws: conversations go on over a new connection for each turn, so that a turn may meet any process. A turn is a hit if P
has served a turn of its conversation before; the first turns do not count. Workers answer at once (P) or after some
milliseconds (D), with fixed bytes: what differs between the lines is the router alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter

import msgspec

from kvbaton.processes.child_process import KVBATON_ARGV, Program, end, start
from kvbaton.router.openai_api import PAIR_HEADER
from kvbaton_proof.bench.router.router_answer import Answer
from kvbaton_proof.bench.router.router_backends import BACKLOG, HOST, Backend, Desk

SIDE = 4
"""Workers of each role."""
TURNS = 8
TURN_CHARS = 1200
START_S, TURN_S = 60.0, 30.0


class Sharing(msgspec.Struct, kw_only=True):
    """One line of the result."""

    processes: int
    policy: str
    turns: int  # that could have been hits
    hit_share: float
    most_at_one_p: float  # requests at the busiest P, in parts of an equal share
    most_at_one_d: float
    streams_at_one_d: float  # most at the same moment, in parts of an equal share of all conversations


class CountingDesk(Desk):
    """A worker that knows how many streams it had at the same moment."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def stream(self, transport: asyncio.WriteTransport) -> None:
        super().stream(transport)
        self.most = max(self.most, len(self._streams))


async def measured(processes: int, policy: str, conversations: int) -> Sharing:
    """One router, started and ended."""
    loop = asyncio.get_running_loop()
    desks = {(role, number): CountingDesk() for role in "PD" for number in range(SIDE)}
    words = [*KVBATON_ARGV, "router", "--port", "0", "--json", "--show-pair", "--policy", policy]
    words += ["--processes", str(processes)]
    servers = []
    for (role, _), desk in desks.items():
        server = await loop.create_server(lambda desk=desk, role=role: Backend(desk, role), HOST, 0, backlog=BACKLOG)  # type: ignore[misc]
        servers.append(server)
        port = server.sockets[0].getsockname()[1]
        words += ["--prefill-url" if role == "P" else "--decode-url", f"http://{HOST}:{port}"]
    child = await start(Program("router", "router", words), None, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.process.stdout is not None
        said = json.loads(await asyncio.wait_for(child.process.stdout.readline(), START_S))
        port = int(said["url"].rpartition(":")[2])
        pairs = await asyncio.gather(*(_conversation(port, number) for number in range(conversations)))
    finally:
        await end([child])
        for server in servers:
            server.close()
    hits = sum(pair[0] in {each[0] for each in told[:at]} for told in pairs for at, pair in enumerate(told) if at)
    p, d = (Counter(pair[side] for told in pairs for pair in told) for side in (0, 1))
    share = conversations * TURNS / SIDE
    most = max(desk.most for (role, _), desk in desks.items() if role == "D")
    turns = conversations * (TURNS - 1)
    return Sharing(
        processes=processes, policy=policy, turns=turns, hit_share=round(hits / turns, 3),
        most_at_one_p=round(max(p.values()) / share, 2), most_at_one_d=round(max(d.values()) / share, 2),
        streams_at_one_d=round(most * SIDE / conversations, 2),
    )  # fmt: skip


async def _conversation(port: int, number: int) -> list[tuple[str, str]]:
    """P and D of each turn."""
    pairs = []
    for turn in range(1, TURNS + 1):
        text = f"conversation {number} ".ljust(TURN_CHARS, "x") * turn
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": 64, "stream": True}).replace(": ", ":")
        async with asyncio.timeout(TURN_S):
            pairs.append(await _asked(port, body.encode()))
    return pairs


async def _asked(port: int, body: bytes) -> tuple[str, str]:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = Answer()
        while not answer.feed(data := await reader.read(1 << 16)):
            if not data:
                raise ConnectionResetError("no whole answer")
    finally:
        writer.close()
    wrong = answer.wrong(stream=True)
    if wrong:
        raise ValueError(wrong)
    lines = answer.data.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    prefill, _, decode = next(line for line in lines if line.startswith(PAIR_HEADER)).partition(": ")[2].partition("/")
    return prefill, decode


async def _all(counts: list[int], policies: list[str], conversations: int) -> list[Sharing]:
    return [await measured(count, policy, conversations) for policy in policies for count in counts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--policies", default="prefix,least-loaded")
    parser.add_argument("--conversations", type=int, default=8, help="at the same time")
    args = parser.parse_args()
    import uvloop

    counts = [int(count) for count in args.processes.split(",")]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_all(counts, args.policies.split(","), args.conversations))
    print(json.dumps(msgspec.to_builtins(found), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
