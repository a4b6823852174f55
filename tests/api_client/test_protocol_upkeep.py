"""What an operator meets: streams that must not grow, things deleted by hand, versions side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from chairlift_client import keys
from chairlift_client.operations import (
    cancel,
    counts,
    dead_drop,
    dead_list,
    dead_read,
    dead_retry,
    jobs,
    status,
)
from chairlift_client.worker_operations import RetryPolicy, fail, tidy
from protocol_driver import LEASE_MS, POLICY, Driver, job_number
from servers import ClusterServers, Flavour, Server

JOB = job_number(1)
ONCE = POLICY._replace(max_failures=1)


@pytest.fixture
def lone_driver(flavour: Flavour) -> Iterator[Driver]:
    """A server of its own, to be treated badly."""
    with Server(flavour) as server, server.client() as client:
        driver = Driver(client, "lone")
        driver.load()
        yield driver


def num_errors(driver: Driver) -> int:
    """Errors that the server has counted."""
    stats = driver.redis.info("errorstats")
    return sum(kind["count"] for kind in stats.values())


class TestNothingGrows:
    def test_streams_do_not_grow(self, driver: Driver) -> None:
        """XACK alone deletes nothing."""
        driver.submit(job_number(9_999), tenant="stays", delay_ms=1_000_000)
        sizes = []
        for turn in range(6):
            for index in range(20):
                driver.submit(job_number(100 * turn + index))
            for job in driver.take("w"):
                driver.complete("w", job)
            ended = [name for name in driver.names() if name.startswith(("job:", "ev:"))]
            sizes.append(len(driver.names()) - len(ended))
            assert driver.streams() == []
        assert len(set(sizes)) == 1
        assert driver.redis.xlen(f"{driver.prefix}:wake") < 150

    def test_a_stream_with_somebody_in_it_loses_those_who_left(self, driver: Driver) -> None:
        driver.submit(JOB)
        driver.take("w")
        for index in range(10, 40):
            driver.submit(job_number(index))
            (job,) = driver.take("w")
            driver.complete("w", job)
        assert driver.redis.xlen(f"{driver.prefix}:q:normal:t") == 1

    def test_the_list_of_jobs_forgets_what_has_expired(self, driver: Driver) -> None:
        """Also where the oldest jobs live longest."""
        for index in range(3):
            driver.submit(job_number(index), delay_ms=1_000_000)
        for index in range(10, 400):
            driver.submit(job_number(index))
            (job,) = driver.take("w")
            driver.complete("w", job)
            driver.redis.delete(f"{driver.prefix}:job:{job.job_id}", f"{driver.prefix}:ev:{job.job_id}")
        assert driver.redis.zcard(f"{driver.prefix}:jobs") < 60
        assert {row.job_id for row in driver.run(jobs(driver.prefix, 0, 500))} >= {
            job_number(0),
            job_number(2),
        }

    def test_every_key_ends_in_every_state(self, driver: Driver) -> None:
        for index in range(8):
            driver.submit(job_number(index), tenant="ab"[index % 2], idempotency=f"k{index}")
        driver.submit(job_number(20), delay_ms=1_000_000)
        driver.submit(job_number(21), version=2)
        taken = driver.take("w", 5)
        driver.complete("w", taken[0])
        driver.run(cancel(driver.prefix, taken[1].job_id))
        driver.run(fail(driver.prefix, "w", taken[2].job_id, 1, reason="x", jitter=0, policy=POLICY))
        driver.run(fail(driver.prefix, "w", taken[3].job_id, 1, reason="x", jitter=0, policy=ONCE))
        driver.lapse()
        driver.reap()
        driver.take("x", 2, on_board=1)
        driver.renew("x")
        driver.run(tidy(driver.prefix, lease_ms=LEASE_MS, dead_ttl_ms=1_000))
        assert driver.without_expiry() == []

    def test_consumers_go_only_when_nothing_is_pending_for_them(self, driver: Driver) -> None:
        for index in range(3):
            driver.submit(job_number(index))
        (kept,) = driver.take("busy", 1)
        (done,) = driver.take("idle", 1)
        driver.complete("idle", done)
        removed = driver.run(tidy(driver.prefix, lease_ms=LEASE_MS, dead_ttl_ms=1_000))
        assert removed == 0, "it has been there a moment ago"
        driver.redis.ping()
        removed = driver.run(tidy(driver.prefix, lease_ms=-1, dead_ttl_ms=1_000))
        assert removed == 1
        assert [entry["consumer"] for entry in driver.pending("q:normal:t")] == ["busy"]
        assert driver.renew("busy", (kept.job_id, 1)).lost == ()

    def test_limits_live_as_long_as_a_worker_tidies(self, driver: Driver) -> None:
        driver.redis.hset(f"{driver.prefix}:limits", "known", 1)
        driver.redis.pexpire(f"{driver.prefix}:limits", 1_000)
        driver.run(tidy(driver.prefix, lease_ms=LEASE_MS, dead_ttl_ms=1_000))
        assert driver.redis.pttl(f"{driver.prefix}:limits") > 6 * 86_400_000


class TestDeletedByHand:
    def test_a_running_job_outlives_its_stream(self, driver: Driver) -> None:
        driver.submit(JOB)
        (job,) = driver.take("w")
        driver.delete_stream("q:normal:t")
        assert driver.renew("w", (JOB, 1)) == ((), ())
        driver.lapse("w")
        assert driver.renew("w", (JOB, 1)) == ((), ())
        assert driver.reap() == (False, 0, 0, 0, 0)
        assert driver.take("other") == ()
        driver.complete("w", job)
        driver.assert_nothing_is_left()

    def test_a_running_job_finishes_without_its_stream(self, driver: Driver) -> None:
        driver.submit(JOB)
        (job,) = driver.take("w")
        driver.delete_stream("q:normal:t")
        driver.complete("w", job)
        driver.assert_nothing_is_left()

    @pytest.mark.parametrize("is_renewed", [False, True])
    def test_its_lease_still_lapses_when_its_worker_dies(self, driver: Driver, is_renewed: bool) -> None:
        driver.submit(JOB)
        driver.take("w")
        driver.delete_stream("q:normal:t")
        if is_renewed:
            driver.renew("w", (JOB, 1))
        else:
            assert driver.reap().mended == 1
        driver.lapse()
        assert driver.reap().moved == 1
        (job,) = driver.take("heir")
        driver.complete("heir", job)
        driver.assert_nothing_is_left()

    @pytest.mark.parametrize("stream", ["q:normal:t", "q:resumed", "q:suspect", "q:alone", "q:newer:2"])
    def test_waiting_jobs_are_found_again(self, driver: Driver, stream: str) -> None:
        driver.submit(JOB, version=2 if stream == "q:newer:2" else 1)
        for turn in range({"q:resumed": 1, "q:suspect": 1, "q:alone": 2}.get(stream, 0)):
            (job,) = driver.take(f"w{turn}")
            if stream == "q:resumed":
                driver.emit(f"w{turn}", JOB, 1, 2)
            driver.lapse()
            driver.reap()
        if stream == "q:newer:2":
            assert driver.take("old") == ()
        assert driver.line(stream) == [JOB]
        driver.delete_stream(stream)
        assert driver.take("w", version=2) == ()
        assert driver.reap().mended == 1
        assert driver.reap().mended == 0
        (job,) = driver.take("w", version=2)
        driver.complete("w", job)
        driver.assert_nothing_is_left()

    def test_new_jobs_do_not_wait_for_the_lost_ones(self, driver: Driver) -> None:
        driver.submit(JOB)
        driver.delete_stream("q:normal:t")
        driver.submit(job_number(2))
        assert [job.job_id for job in driver.take("w")] == [job_number(2)]
        assert driver.reap().mended == 1
        assert [job.job_id for job in driver.take("w")] == [JOB]
        assert driver.gauges()["running"] == 2

    def test_many_lost_jobs_are_found_a_few_at_a_time(self, driver: Driver) -> None:
        for index in range(300):
            driver.submit(job_number(index))
        driver.delete_stream("q:normal:t")
        assert [driver.reap().mended for _ in range(4)] == [256, 44, 0, 0]
        assert len(driver.take("w", 500)) == 300

    @pytest.mark.parametrize("name", ["later", "held", "active:normal"])
    def test_a_deleted_set_is_filled_again(self, driver: Driver, name: str) -> None:
        driver.submit(JOB, delay_ms=1_000_000 if name == "later" else 0)
        if name == "held":
            driver.take("w")
        driver.redis.delete(f"{driver.prefix}:{name}")
        driver.reap()
        driver.make_due(JOB)
        driver.lapse()
        driver.reap()
        (job,) = driver.take("heir")
        driver.complete("heir", job)
        driver.assert_nothing_is_left()

    @pytest.mark.parametrize("stream", ["q:normal:t", "q:suspect", "q:alone"])
    def test_a_destroyed_group_begins_again_and_runs_nothing_twice(self, driver: Driver, stream: str) -> None:
        """At 0, so that nothing is skipped; what runs already stays where it is."""
        for index in range(3):
            driver.submit(job_number(index))
        for turn in range({"q:suspect": 1, "q:alone": 2}.get(stream, 0)):
            for worker in range(3):
                driver.take(f"w{turn}{worker}")
            driver.lapse()
            driver.reap()
        (running,) = driver.take("runs", 1)
        driver.redis.xgroup_destroy(f"{driver.prefix}:{stream}", keys.GROUP)
        others = [job.job_id for worker in ("x", "y", "z") for job in driver.take(worker)]
        assert sorted([*others, running.job_id]) == [job_number(index) for index in range(3)]
        assert driver.renew("runs", (running.job_id, running.epoch)).lost == ()
        driver.complete("runs", running)
        assert driver.gauges()["running"] == 2

    def test_a_deleted_consumer_loses_no_job(self, driver: Driver) -> None:
        driver.submit(JOB)
        driver.take("w")
        driver.redis.xgroup_delconsumer(f"{driver.prefix}:q:normal:t", keys.GROUP, "w")
        assert driver.reap().mended == 1
        assert [entry["consumer"] for entry in driver.pending("q:normal:t")] == ["w"]
        driver.redis.xgroup_delconsumer(f"{driver.prefix}:q:normal:t", keys.GROUP, "w")
        assert driver.renew("w", (JOB, 1)).lost == ()
        assert [entry["consumer"] for entry in driver.pending("q:normal:t")] == ["w"]

    def test_flushall_under_a_worker(self, lone_driver: Driver) -> None:
        driver = lone_driver
        driver.submit(JOB)
        driver.take("w")
        driver.redis.flushall()
        assert driver.renew("w", (JOB, 1)).lost == (JOB,)
        assert driver.emit("w", JOB, 1, 2) == "lost"
        assert driver.finish("w", JOB, 1, 2) == "lost"
        assert driver.take("w") == ()
        driver.submit(job_number(2))
        (job,) = driver.take("w")
        driver.complete("w", job)
        driver.assert_nothing_is_left()

    def test_idle_turns_make_no_errors_and_no_keys(self, lone_driver: Driver) -> None:
        """An operator who watches errorstats sees nothing of an idle or of a busy worker."""
        driver = lone_driver
        for index in range(5):
            driver.submit(job_number(index), tenant=f"t{index}")
        before = num_errors(driver)
        for job in driver.take("w"):
            driver.complete("w", job)
        driver.reap()
        names = driver.names()
        for _ in range(20):
            assert driver.take("w") == ()
            driver.renew("w")
            driver.reap()
            driver.run(tidy(driver.prefix, lease_ms=LEASE_MS, dead_ttl_ms=1_000))
        assert num_errors(driver) == before
        assert driver.names() == names

    def test_deleted_counters_come_right_when_the_queue_is_empty(self, driver: Driver) -> None:
        for index in range(5):
            driver.submit(job_number(index))
        driver.redis.delete(f"{driver.prefix}:n")
        driver.submit(job_number(9))
        for job in driver.take("w"):
            driver.complete("w", job)
        driver.assert_nothing_is_left()


class TestVersions:
    def test_a_newer_job_goes_aside_once_and_waits_for_a_newer_worker(self, driver: Driver) -> None:
        driver.submit(JOB, version=2)
        driver.submit(job_number(2))
        (job,) = driver.take("old", version=1)
        driver.complete("old", job)
        assert driver.line("q:newer:2") == [JOB]
        before = driver.snapshot()
        wakes = driver.redis.xlen(f"{driver.prefix}:wake")
        for _ in range(5):
            assert driver.take("old", version=1) == ()
        assert driver.snapshot() == before
        assert driver.redis.xlen(f"{driver.prefix}:wake") == wakes
        (job,) = driver.take("new", version=2)
        driver.complete("new", job)
        driver.assert_nothing_is_left()

    def test_it_is_resumed_by_newer_workers_only(self, driver: Driver) -> None:
        driver.submit(JOB, version=2)
        driver.take("new", version=2)
        driver.emit("new", JOB, 1, 2)
        driver.lapse()
        driver.reap()
        assert driver.take("old", version=1) == ()
        (job,) = driver.take("new2", version=2)
        assert job.epoch == 2

    def test_it_can_be_cancelled_and_expires_meanwhile(self, driver: Driver) -> None:
        for index in range(2):
            driver.submit(job_number(index), version=3)
        assert driver.take("old") == ()
        assert driver.run(cancel(driver.prefix, job_number(0))) == "ok"
        driver.make_overdue(job_number(1))
        driver.take("old")
        driver.assert_nothing_is_left()


class TestDeadLetters:
    def bury(self, driver: Driver, index: int, policy: RetryPolicy = ONCE) -> str:
        driver.submit(job_number(index), b"the body", tenant="x", job_class="high", idempotency=f"k{index}")
        (job,) = driver.take("w")
        driver.run(fail(driver.prefix, "w", job.job_id, job.epoch, reason="no luck", jitter=0, policy=policy))
        return driver.run(dead_list(driver.prefix))[-1][0]

    def test_listed_in_pages_oldest_first(self, driver: Driver) -> None:
        letters = [self.bury(driver, index) for index in range(5)]
        first = driver.run(dead_list(driver.prefix, count=2))
        rest = driver.run(dead_list(driver.prefix, first[-1][0]))
        assert [letter for letter, _ in (*first, *rest)] == letters
        fields = first[0][1]
        assert (fields["body"], fields["worker"], fields["class"]) == (b"", b"w", b"high")
        assert fields["reason"] == b"1 failed attempts, the last: no luck"
        whole = driver.run(dead_read(driver.prefix, letters[0]))
        assert whole == {**fields, "body": b"the body"}
        assert driver.run(dead_read(driver.prefix, "1-1")) == {}

    def test_dropped(self, driver: Driver) -> None:
        letter = self.bury(driver, 1)
        assert [driver.run(dead_drop(driver.prefix, letter)) for _ in range(2)] == [1, 0]
        assert driver.run(dead_list(driver.prefix)) == ()

    def test_retried_under_its_id_and_the_repeat_is_known(self, driver: Driver) -> None:
        letter = self.bury(driver, 1)
        call = dead_retry(driver.prefix, letter, queue_ttl_ms=1_000_000, result_ttl_ms=1_000_000)
        assert driver.run(call) == "ok"
        before = driver.snapshot()
        assert driver.run(call) == "dup"
        assert driver.snapshot() == before
        (job,) = driver.take("w")
        assert (job.job_id, job.body, job.tenant, job.job_class) == (JOB, b"the body", "x", "high")
        assert (job.failures, job.losses, job.seq, job.seed) == (0, 1, 1, 7)
        driver.complete("w", job)
        driver.assert_nothing_is_left()
        assert driver.run(dead_retry(driver.prefix, "1-1", queue_ttl_ms=1, result_ttl_ms=1)) == "absent"

    def test_an_owner_of_the_former_life_is_a_stranger_in_the_new_one(self, driver: Driver) -> None:
        letter = self.bury(driver, 1)
        driver.run(dead_retry(driver.prefix, letter, queue_ttl_ms=1_000_000, result_ttl_ms=1_000_000))
        (job,) = driver.take("w")
        assert job.epoch == 2
        assert driver.emit("w", JOB, 1, 2) == "lost"
        assert driver.finish("w", JOB, 1, 2) == "lost"

    def test_retried_long_after_its_hash_is_gone(self, driver: Driver) -> None:
        letter = self.bury(driver, 1)
        driver.redis.delete(*(f"{driver.prefix}:{name}" for name in driver.names() if JOB in name))
        call = dead_retry(driver.prefix, letter, queue_ttl_ms=1_000_000, result_ttl_ms=1_000_000)
        assert driver.run(call) == "ok"
        assert [job.job_id for job in driver.take("w")] == [JOB]

    def test_a_live_job_is_not_begun_anew(self, driver: Driver) -> None:
        letter = self.bury(driver, 1)
        driver.redis.delete(f"{driver.prefix}:job:{JOB}", f"{driver.prefix}:idem:k1")
        driver.submit(JOB)
        call = dead_retry(driver.prefix, letter, queue_ttl_ms=1_000_000, result_ttl_ms=1_000_000)
        assert driver.run(call) == "live"

    def test_kept_by_age_and_by_number(self, driver: Driver) -> None:
        policy = ONCE._replace(dead_count=100)
        for index in range(320):
            self.bury(driver, index, policy)
        assert driver.redis.xlen(f"{driver.prefix}:dead") < 310
        driver.run(tidy(driver.prefix, lease_ms=LEASE_MS, dead_ttl_ms=-1_000))
        assert driver.redis.xlen(f"{driver.prefix}:dead") == 0


def run_everything(driver: Driver) -> None:
    """Every function once."""
    for index in range(4):
        assert driver.submit(job_number(index), idempotency=f"k{index}").kind == "ok"
    first, second, third, fourth = driver.take("w")
    driver.complete("w", first)
    driver.run(cancel(driver.prefix, second.job_id))
    driver.run(fail(driver.prefix, "w", third.job_id, 1, reason="x", jitter=0, policy=ONCE))
    driver.redis.delete(f"{driver.prefix}:q:normal:t")
    driver.renew("w", (fourth.job_id, 1))
    driver.lapse()
    driver.reap()
    driver.run(tidy(driver.prefix, lease_ms=-1, dead_ttl_ms=1_000_000))
    driver.run(counts(driver.prefix))
    driver.run(status(driver.prefix, fourth.job_id))
    ((letter, _),) = driver.run(dead_list(driver.prefix))
    driver.run(dead_retry(driver.prefix, letter, queue_ttl_ms=1_000_000, result_ttl_ms=1_000_000))
    for job in driver.take("x", version=2):
        driver.complete("x", job)


def test_a_user_who_may_only_touch_its_namespace_can_do_everything(lone_driver: Driver) -> None:
    driver = lone_driver
    rules = ["on", ">pw", "~cl:{mine/*", "~cl:{mine}*", "&cl:{mine/*", "+@all", "-@dangerous", "-@admin"]
    driver.redis.execute_command("ACL", "SETUSER", "worker", *rules, "+info")
    driver.redis.execute_command("AUTH", "worker", "pw")
    mine, other = Driver(driver.redis, "mine"), Driver(driver.redis, "other")
    # Looking for keys reaches beyond a namespace; the functions never do it.
    mine.streams = lambda: ["q:resumed", "q:suspect", "q:adopted"]  # type: ignore[method-assign]
    mine.lapse = lambda worker=None: None  # type: ignore[method-assign]
    run_everything(mine)
    with pytest.raises((NoPermissionError, ResponseError)):
        other.submit(JOB)
    with pytest.raises((NoPermissionError, ResponseError)):
        driver.redis.flushall()


def test_everything_works_in_a_cluster(flavour: Flavour) -> None:
    """Every key that a function touches lies in the slot of its first."""
    done = []
    with ClusterServers(flavour) as cluster:
        for server in cluster.servers:
            with server.client() as client:
                for partition in range(4):
                    driver = Driver(client, "ns", partition=partition)
                    driver.load()
                    if serves(driver):
                        run_everything(driver)
                        done.append(partition)
    assert sorted(done) == [0, 1, 2, 3]


def serves(driver: Driver) -> bool:
    """Whether this node of a cluster has the partition."""
    try:
        driver.redis.exists(driver.prefix)
    except ResponseError as error:
        if not str(error).startswith("MOVED"):
            raise
        return False
    return True
