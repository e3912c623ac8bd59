"""Strangers in a process of their own, so that what they cost themselves is not taken for what they cost others.

    python intruders.py '{"ports": [["127.0.0.1", 1]], "seconds": 1, "seed": 1, "each": 0, "keys": []}'

Says "here" when the crowd of idle connections stands, and the counts when all are gone.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys

from kvbaton_proof.chaos.strangers import crowd, visit


async def main(told: dict) -> None:
    ports = [(host, port) for host, port in told["ports"]]
    async with crowd(ports, told["each"]) as count:
        print(json.dumps({"idle": count}), flush=True)
        counts = await visit(ports, told["seconds"], random.Random(told["seed"]), public_keys=told["keys"])
        if not told["seconds"]:
            sys.stdin.read()  # the crowd stays until it is told to go
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(main(json.loads(sys.argv[1])))
