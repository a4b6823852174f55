"""Who is next, and who is turned away: classes, tenants, limits."""

from __future__ import annotations

from collections import Counter

import pytest

from chairlift_client.operations import Submission, counts, status, submit
from chairlift_client.worker_operations import open_partition
from protocol_driver import Driver, job_number


def open_with(driver: Driver, **limits: int) -> None:
    chosen = {"context_tokens": 0, "pool_tokens": 0, "max_waiting": 0, "max_bytes": 0, "max_tenant_jobs": 0}
    driver.run(open_partition(driver.prefix, **(chosen | limits)))


def serve(driver: Driver, num_jobs: int, *, tokens: int = 10) -> list[str]:
    """Run jobs one after another; their ids."""
    served = []
    for _ in range(num_jobs):
        (job,) = driver.take("w", 1)
        driver.complete("w", job, tokens=tokens)
        served.append(job.job_id)
    return served


def age(driver: Driver, job_id: str, ms: int) -> None:
    """Make a waiting job older: its entry gets an earlier id. Only for a stream of one."""
    stream, _ = driver.job(job_id)["entry"].split(" ")
    key = f"{driver.prefix}:{stream}"
    assert driver.redis.xlen(key) == 1
    driver.redis.delete(key)
    entry = f"{driver.now_ms() - ms}-0"
    driver.redis.xgroup_create(key, "workers", "0", mkstream=True)
    driver.redis.xadd(key, {"id": job_id}, id=entry)
    driver.redis.pexpire(key, 86_400_000)
    driver.redis.hset(f"{driver.prefix}:job:{job_id}", "entry", f"{stream} {entry}")


class TestTenants:
    def test_a_hundred_jobs_of_one_cannot_starve_one_of_another(self, driver: Driver) -> None:
        for index in range(100):
            driver.submit(job_number(index), tenant="many")
        serve(driver, 5)
        driver.submit(job_number(500), tenant="one")
        assert job_number(500) in serve(driver, 2)

    def test_equal_tenants_take_turns(self, driver: Driver) -> None:
        for index in range(60):
            driver.submit(job_number(index), tenant="abc"[index % 3])
        served = Counter(driver.job(job_id)["tenant"] for job_id in serve(driver, 30))
        assert served == {"a": 10, "b": 10, "c": 10}

    def test_shares_are_in_tokens_not_in_jobs(self, driver: Driver) -> None:
        """Tenant a's jobs use five times the tokens: it gets a fifth of the jobs."""
        for index in range(120):
            driver.submit(job_number(index), tenant="ab"[index % 2], cost=10)
        served: Counter[str] = Counter()
        for _ in range(60):
            (job,) = driver.take("w", 1)
            served[job.tenant] += 1
            driver.complete("w", job, tokens=50 if job.tenant == "a" else 10)
        assert 8 <= served["a"] <= 12

    def test_a_newcomer_has_saved_nothing_up(self, driver: Driver) -> None:
        for index in range(40):
            driver.submit(job_number(index), tenant="early")
        serve(driver, 20)
        for index in range(40, 80):
            driver.submit(job_number(index), tenant="late")
        served = Counter(driver.job(job_id)["tenant"] for job_id in serve(driver, 20))
        assert served["late"] in (10, 11)

    def test_who_left_and_returns_while_others_wait_is_where_it_was(self, driver: Driver) -> None:
        driver.submit(job_number(1), tenant="x", cost=1_000)
        for index in range(10, 30):
            driver.submit(job_number(index), tenant="y", cost=10)
        while driver.state(job_number(1)) == "waiting":
            serve(driver, 1, tokens=1_000)
        driver.submit(job_number(2), tenant="x")
        assert job_number(2) not in serve(driver, 1, tokens=10)

    def test_when_nobody_waits_all_are_even_again(self, driver: Driver) -> None:
        for turn in range(5):
            driver.submit(job_number(turn), tenant="a")
            driver.submit(job_number(turn + 50), tenant="b")
            serve(driver, 2)
        assert [name for name in driver.names() if name.startswith(("served", "active"))] == []

    def test_a_job_taken_over_is_charged_once(self, driver: Driver) -> None:
        for index in range(3):
            driver.submit(job_number(index), cost=100)
        driver.submit(job_number(9), tenant="other")
        for worker in ("w1", "w2", "w3"):
            driver.take(worker, 1)
            driver.lapse(worker)
            driver.reap()
        scores = dict(driver.redis.zrange(f"{driver.prefix}:active:normal", 0, -1, withscores=True))
        assert scores[b"t"] in (0, 100, 200)


class TestClasses:
    def test_a_higher_class_of_the_same_age_is_first(self, driver: Driver) -> None:
        for index, job_class in enumerate(("batch", "low", "normal", "high")):
            driver.submit(job_number(index), job_class=job_class)
            age(driver, job_number(index), 1_000)
        assert serve(driver, 4) == [job_number(index) for index in (3, 2, 1, 0)]

    @pytest.mark.parametrize(("low", "ratio"), [("normal", 4), ("low", 16), ("batch", 64)])
    def test_a_low_class_is_slower_but_never_starves(self, driver: Driver, low: str, ratio: int) -> None:
        """It waits at most `ratio` times as long as the high class, whatever comes in there."""
        for wait_ms, is_first in ((ratio * 500, False), (ratio * 2_000, True)):
            driver.submit(job_number(wait_ms), job_class=low)
            age(driver, job_number(wait_ms), wait_ms)
            driver.submit(job_number(wait_ms + 1), job_class="high")
            age(driver, job_number(wait_ms + 1), 1_000)
            order = serve(driver, 2)
            assert (order[0] == job_number(wait_ms)) == is_first

    def test_resumed_jobs_come_before_every_class(self, driver: Driver) -> None:
        driver.submit(job_number(1), job_class="batch")
        driver.take("a")
        assert driver.emit("a", job_number(1), 1, 2) == "ok"
        driver.lapse()
        driver.reap()
        driver.submit(job_number(2), job_class="high")
        assert [job.job_id for job in driver.take("w", 1)] == [job_number(1)]

    def test_within_a_tenant_first_come_first_served(self, driver: Driver) -> None:
        for index in range(30):
            driver.submit(job_number(index))
        assert [job.job_id for job in driver.take("w", 30)] == [job_number(index) for index in range(30)]

    def test_capacity_is_kept_to_and_used_up(self, driver: Driver) -> None:
        for index in range(10):
            driver.submit(job_number(index), job_class=("high", "low")[index % 2], tenant="abc"[index % 3])
        assert [len(driver.take("w", capacity)) for capacity in (0, 3, 4, 9)] == [0, 3, 4, 3]


class TestLimits:
    @pytest.mark.parametrize(
        ("limits", "what"),
        [
            ({"max_waiting": 3}, "jobs waiting"),
            ({"max_bytes": 35}, "bytes of jobs"),
            ({"max_tenant_jobs": 3}, "jobs of the tenant"),
        ],
    )
    def test_the_first_job_over_a_limit_is_refused_with_the_numbers(
        self, driver: Driver, limits: dict[str, int], what: str
    ) -> None:
        open_with(driver, **limits)
        for index in range(3):
            assert driver.submit(job_number(index), b"0123456789").kind == "ok"
        before = driver.snapshot()
        refused = driver.submit(job_number(3), b"0123456789")
        assert (refused.kind, refused.what, refused.limit) == ("full", what, next(iter(limits.values())))
        assert refused.have > refused.limit
        assert driver.snapshot() == before
        (job,) = driver.take("w", 1)
        driver.complete("w", job)
        assert driver.submit(job_number(4), b"0123456789").kind == "ok"

    def test_the_limit_of_a_tenant_is_its_own(self, driver: Driver) -> None:
        open_with(driver, max_tenant_jobs=1)
        assert driver.submit(job_number(1), tenant="a").kind == "ok"
        assert driver.submit(job_number(2), tenant="a").kind == "full"
        assert driver.submit(job_number(3), tenant="b").kind == "ok"

    def test_retry_after_comes_from_the_measured_rate(self, driver: Driver) -> None:
        """One job in two seconds, and five over the limit: the queue has room in ten."""
        open_with(driver, max_waiting=10)
        for index in range(10):
            driver.submit(job_number(index))
        assert driver.submit(job_number(20)).retry_ms == 1_000, "not measured yet: a guess"
        for _ in range(40):
            (job,) = driver.take("w", 1)
            driver.redis.hset(f"{driver.prefix}:n", "last_finish", driver.now_ms() - 2_000)
            driver.redis.hset(f"{driver.prefix}:n", "busy_since", driver.now_ms() - 60_000)
            driver.complete("w", job)
            driver.submit(job_number(100 + driver.numbers["w"]))
        open_with(driver, max_waiting=6)
        retry_ms = driver.submit(job_number(20)).retry_ms
        assert 9_500 <= retry_ms <= 10_500
        found = driver.run(status(driver.prefix, driver.line("q:normal:t")[2]))
        assert found is not None
        assert found.position == 3
        assert 5_700 <= found.eta_ms <= 6_300

    def test_an_idle_time_is_not_taken_for_a_slow_queue(self, driver: Driver) -> None:
        driver.submit(job_number(1))
        (job,) = driver.take("w", 1)
        driver.complete("w", job)
        driver.redis.hset(f"{driver.prefix}:n", "last_finish", driver.now_ms() - 3_600_000)
        driver.submit(job_number(2))
        driver.submit(job_number(3))
        (job,) = driver.take("w", 1)
        driver.complete("w", job)
        assert driver.counter("interval") < 60_000

    @pytest.mark.parametrize(("what", "limit"), [("context", "context_tokens"), ("pool", "pool_tokens")])
    def test_what_can_never_fit_is_refused_with_both_numbers(
        self, driver: Driver, what: str, limit: str
    ) -> None:
        open_with(driver, **{limit: 100})
        assert driver.submit(job_number(1), prompt_tokens=90, output_tokens=10).kind == "ok"
        refused = driver.submit(job_number(2), prompt_tokens=91, output_tokens=10)
        assert (refused.kind, refused.what, refused.have, refused.limit) == ("too_long", what, 101, 100)
        assert driver.submit(job_number(3), prompt_tokens=100).kind == "too_long"
        assert driver.submit(job_number(4), prompt_tokens=0, output_tokens=1_000).kind == "ok"

    def test_an_unknown_model_is_refused_unless_allowed(self, driver: Driver) -> None:
        assert driver.submit(job_number(1), allow_unknown=False).kind == "unknown"
        assert driver.names() == []
        assert driver.submit(job_number(1), allow_unknown=True).kind == "ok"
        open_with(driver)
        assert driver.submit(job_number(2), allow_unknown=False).kind == "ok"


def test_seeds_and_times_keep_every_digit(driver: Driver) -> None:
    """Lua's numbers are doubles, and its own way of writing them has fourteen digits."""

    seed = 2**63 - 1
    job = Submission(
        job_number(1), b"x", 1, "normal", "t", 10, seed, deadline_ms=366 * 86_400_000, allow_unknown=True
    )
    assert driver.run(submit(driver.prefix, job)).kind == "ok"
    (claimed,) = driver.take("w")
    assert claimed.seed == seed
    assert claimed.deadline_ms - claimed.submitted_ms == 366 * 86_400_000
    assert abs(claimed.submitted_ms - driver.now_ms()) < 10_000


def test_counts_tell_ages_and_change_nothing(driver: Driver) -> None:
    for index, job_class in enumerate(("high", "batch")):
        driver.submit(job_number(index), job_class=job_class)
        age(driver, job_number(index), 5_000)
    before = driver.snapshot()
    found = driver.run(counts(driver.prefix))
    assert set(found.head_age_ms) == {"high", "batch"}
    assert all(5_000 <= value < 15_000 for value in found.head_age_ms.values())
    assert found.counters["waiting"] == 2
    assert driver.snapshot() == before
