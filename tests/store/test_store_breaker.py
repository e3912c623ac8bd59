"""The breaker: one failure silences, one try at a time may end it."""

from __future__ import annotations

from kvbaton.store.order_scheduler import Breaker


def test_a_store_that_works_is_always_asked() -> None:
    breaker = Breaker(1, 8)
    assert all(breaker.may_ask(now) for now in range(5))


def test_after_a_failure_one_at_a_time_may_try_and_waits_double() -> None:
    breaker = Breaker(1, 4)
    waits, now = [], 0.0
    for _ in range(4):
        breaker.failed(now)
        wait = next(step / 10 for step in range(100) if breaker.may_ask(now + step / 10))
        waits.append(wait)
        now += wait
        assert not breaker.may_ask(now + 100), "two tried at once"
    assert waits == [1, 2, 4, 4]
    breaker.succeeded()
    assert breaker.may_ask(now)
    assert breaker.may_ask(now)


def test_calls_that_were_under_way_at_the_failure_do_not_prolong_it() -> None:
    breaker = Breaker(1, 8)
    for _ in range(5):
        breaker.failed(0.5)
    assert breaker.may_ask(1.5)
