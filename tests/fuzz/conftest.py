"""How hard the fuzzing tries: in `make test` always the same cases, `KVBATON_FUZZ=nightly` new ones, ten times more."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow]  # the machine may be busy; the time-out of a test is pytest's

settings.register_profile(
    "make-test",
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=_SLOW_MACHINE,
)
settings.register_profile(
    "nightly",
    max_examples=5_000,
    derandomize=False,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW_MACHINE,
)
