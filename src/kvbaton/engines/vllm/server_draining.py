"""A vLLM server that drains: routers send nobody new, and the operator learns when nothing is left.

Law: vLLM is not ended from here. "Nothing" is said only when the server itself says that no request runs or waits, the
ledger holds nothing for anybody, and both have been so for `QUIET_S`; a server that cannot be asked is never idle. An
engine without a server of its own is asked nothing: the ledger alone decides, since its host knows its requests.
"""

from __future__ import annotations

import http.client
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable

import msgspec

from kvbaton.control.registry.member import HeldReport
from kvbaton.control.registry.registry_group import RegistryGroup

POLL_S = 0.5
QUIET_S = 2.0
ASK_S = 5.0

_GAUGE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{([^}]*)\})? ([0-9.eE+]+)$", re.MULTILINE)


def requests_in(metrics: str, rank: int | None = None) -> int | None:
    """How many requests run or wait, by vLLM's own gauges; None where they are not told. `rank`: of that one alone."""
    label = "" if rank is None else f'engine="{rank}"'
    found = [float(value) for labels, value in _GAUGE.findall(metrics) if label in labels]
    return int(sum(found)) if found else None


class DrainWatch:
    """Tells the registry what a draining server still does, from a thread of its own until `closing`."""

    def __init__(
        self,
        client: RegistryGroup,
        http_address: str,
        holds: Callable[[], HeldReport],
        closing: threading.Event,
        forget_s: float = 0.0,
        rank: int | None = None,
    ) -> None:
        """`http_address`: "" where the engine has none. `forget_s`: routers that get no word may send requests for this
        long. `rank`: of the data-parallel ranks behind that address, the one that drains."""
        self._client = client
        self._url = f"http://{http_address}/metrics" if http_address else ""
        self._rank = rank
        self._holds = holds
        self._closing = closing
        self._quiet_since = time.monotonic()
        self._forgotten_at = time.monotonic() + forget_s if forget_s else -math.inf
        self._thread = threading.Thread(target=self._run, name="kvbaton-drain", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            self._client.tell_held(self.told(time.monotonic()))

    def told(self, now: float) -> str:
        """What to say now."""
        requests = self._requests()
        held = self._holds() if requests is None else msgspec.structs.replace(self._holds(), requests=requests)
        if requests is None or not held.nothing or not self._client.is_known_to_drain:
            self._quiet_since = now
        if requests is None:
            return f"{held}; {self._url} does not say how many requests there are"
        too_soon = now < max(self._quiet_since + QUIET_S, self._forgotten_at)
        return "the end of its last request" if held.nothing and too_soon else str(held)

    def _requests(self) -> int | None:
        if not self._url:
            return 0
        try:
            with urllib.request.urlopen(self._url, timeout=ASK_S) as answer:
                return requests_in(answer.read().decode(errors="replace"), self._rank)
        except (OSError, http.client.HTTPException):
            return None
