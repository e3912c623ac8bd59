"""How D asks P under Ray Serve, and how long for: checked once, in the driver and again in each replica.

Law: a key that is unknown, or a value that cannot be meant, is refused by its name when the application is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

FIELD = "kvbaton"
"""Where the settings stand in an `LLMConfig`'s `experimental_configs`."""
_SECONDS = ("choose_timeout_s", "prefill_timeout_s", "rest_s", "linger_s", "health_check_period_s")


class OrchestrationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The argument `kvbaton` of `build_pd_app`. `docs/ray.md` explains each."""

    choose_timeout_s: float = 2.0  # until some P has taken a request; then D computes alone
    prefill_timeout_s: float = 60.0  # until P has computed a prompt, its queue included
    prefill_tries: int = 2  # at so many P, one after the other
    rest_s: float = 5.0  # a P that failed is not asked again for so long
    decode_tries: int = 3  # of a request that had no output yet when its D died
    linger_s: float = 3.0  # a P that is scaled away keeps its KV for so long after its last answer
    health_check_period_s: float = 2.0  # Ray's, of prefill and decode, where deployment_config names none

    def __post_init__(self) -> None:
        for field in _SECONDS:
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{FIELD}.{field}: got {value!r}, expected seconds, above 0")
        for field in ("prefill_tries", "decode_tries"):
            if getattr(self, field) < 1:
                raise ValueError(f"{FIELD}.{field}: got {getattr(self, field)!r}, expected a whole number, at least 1")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> OrchestrationSettings:
        """The settings, or a ValueError that names the key."""
        known = [field.name for field in msgspec.structs.fields(cls)]
        unknown = [str(key) for key in given or {} if key not in known]
        if unknown:
            raise ValueError(f"{FIELD}.{unknown[0]}: unknown; the keys are {', '.join(known)}")
        try:
            return msgspec.convert(dict(given or {}), cls)
        except msgspec.ValidationError as error:
            text = str(error)
            raise ValueError(text if text.startswith(FIELD) else f"{FIELD}: {text}") from None
