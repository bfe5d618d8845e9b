"""Which backend is chosen."""

from __future__ import annotations

from kvpush.proxy.balance import Pool, RoundRobin
from kvpush.proxy.config import DecodeBackend


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_pool(count: int, clock: Clock) -> Pool[DecodeBackend]:
    specs = [DecodeBackend(f"http://d{index}") for index in range(count)]
    return Pool(specs, RoundRobin(), cool_off_s=5.0, now_s=clock)


def picks(pool: Pool[DecodeBackend], count: int) -> str:
    return "".join(pool.pick().url[-1] for _ in range(count))


def test_each_in_turn() -> None:
    assert picks(make_pool(3, Clock()), 7) == "0120120"


def test_one_that_failed_to_connect_is_skipped_for_the_cool_off_time() -> None:
    clock = Clock()
    pool = make_pool(2, clock)
    pool.backends[0].connect_failed()
    assert picks(pool, 3) == "111"
    clock.now_s += 4.9
    assert picks(pool, 2) == "11"
    clock.now_s += 0.1
    assert set(picks(pool, 2)) == {"0", "1"}
    assert pool.backends[0].connect_failures == 1


def test_one_that_answers_is_fit_at_once() -> None:
    pool = make_pool(2, Clock())
    pool.backends[0].connect_failed()
    pool.backends[0].connected()
    assert set(picks(pool, 2)) == {"0", "1"}


def test_with_all_cooling_off_the_one_due_first_is_tried() -> None:
    clock = Clock()
    pool = make_pool(2, clock)
    pool.backends[1].connect_failed()
    clock.now_s += 1
    pool.backends[0].connect_failed()
    assert picks(pool, 2) == "11"


def test_requests_are_counted() -> None:
    backend = make_pool(1, Clock()).backends[0]
    with backend.use():
        assert (backend.in_flight, backend.requests) == (1, 1)
    assert (backend.in_flight, backend.requests) == (0, 1)
