"""A real `mooncake_master` and a real owner of memory, each a process that a test can stop and kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

from kvbaton.testing.transport_harness import poll

DEADLINE_S = 30.0
SEGMENT_BYTES = 64 << 20
_given: set[int] = set()  # to whoever may not have bound it yet

# Lends memory, puts what it is told on its input, and says when it has done so.
OWNER = """
import sys
from kvbaton.control.keyring import Keyring
from kvbaton.ranks.store_trust import trust_of
from kvbaton.store.threaded_store import KeptStore
from kvbaton.store.interface import OrderId, Put, StoreSettings
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.testing.store_case import VALUE_BYTES, names, values
from kvbaton.testing.store_harness import Ends, PinBook
backend = MooncakeBackend(MooncakeSettings(master=sys.argv[1], segment_bytes=int(sys.argv[2])))
store, pins = KeptStore(backend, PinBook(), StoreSettings(value_bytes_max=VALUE_BYTES)), PinBook()
store.set_trust(trust_of(Keyring("owner", "", "", {}, ())).trust)  # as of any engine without keys
ends = Ends(store)
for order, line in enumerate(sys.stdin):
    count, seed = map(int, line.split())
    assert store.submit(Put(OrderId(order), names(count, seed), values(count, seed), (0,), 20.0))
    print(ends.end(order).count, flush=True)
"""


def free_port() -> int:
    """Another one each time. Not from 15000 to 17000, where the library looks for its own."""
    while True:
        port = random.randrange(17_001, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


class Process:
    """A child that ends with the test."""

    def __init__(self, *command: str) -> None:
        quiet = {**os.environ, "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "error"}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet
        )

    def stop(self) -> None:
        """It does nothing more once this returns: the signal alone takes its time on a busy machine."""
        self.child.send_signal(signal.SIGSTOP)
        os.waitpid(self.child.pid, os.WUNTRACED)

    def resume(self) -> None:
        self.child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(DEADLINE_S)
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


class Master(Process):
    """`client_ttl_s`: a client that was silent for so long is gone, and with it the values in its memory."""

    def __init__(self, port: int = 0, client_ttl_s: int = 2) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        binary = Path(sys.executable).with_name("mooncake_master")
        assert binary.exists(), f"{binary} is missing: install mooncake-transfer-engine-non-cuda beside this Python"
        super().__init__(
            str(binary), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}",
            "--enable_metric_reporting=false", f"--client_ttl={client_ttl_s}",
        )  # fmt: skip
        assert self.child.stdout is not None
        assert poll(self._answers, DEADLINE_S), "mooncake_master did not start"

    def _answers(self) -> bool:
        assert self.child.poll() is None, "mooncake_master ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Owner(Process):
    """An engine in a process of its own that lends memory."""

    def __init__(self, master: Master) -> None:
        super().__init__(sys.executable, "-c", OWNER, master.address, str(SEGMENT_BYTES))
        assert poll(lambda: self.put(1, 999) == 1, DEADLINE_S), "the owner could not put"  # it loads the library first

    def put(self, count: int, seed: int) -> int:
        """Have it put a prompt; how many values are in the store then."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(f"{count} {seed}\n")
        self.child.stdin.flush()
        return int(self.child.stdout.readline())
