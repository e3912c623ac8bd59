"""What is measured beside kvbaton: names of engines, stores and transports, and the packages that they are in."""

from __future__ import annotations

AGGREGATED, SINGLE = "aggregated", "single"
"""Engines that hand nothing over: as many as the others have, or one."""

KVBATON, MOONCAKE = "kvbaton", "mooncake"
BACKENDS = (KVBATON, MOONCAKE)
"""The stores there are."""

PACKAGES = {"nixl": ("nixl_cu13", "nixl_cu12", "nixl"), "mooncake": ("mooncake",)}
"""The transports of others there are, and what they are imported as: one of these is enough."""

DISTRIBUTIONS = {
    "nixl": ("nixl-cu13", "nixl-cu12"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
}
ADVICE = "make planes-env installs it"
