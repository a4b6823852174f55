"""What a client in another language may send by mistake: submit refuses it whole, and says which argument."""

from __future__ import annotations

import pytest

from chairlift_client.operations import submit
from protocol_driver import Driver, submission

NAMES = (
    "id", "version", "class", "tenant", "bytes", "cost", "seed", "deadline", "delay", "run at", "queue ttl",
    "result ttl", "idempotency hash", "body hash", "prompt tokens", "output tokens", "allow unknown model",
)  # fmt: skip
NO_WHOLE_NUMBERS = ("", "-1", "1.5", "1e3", "0x10", "ten", " 1", "1 ", "nan", "inf", "1" * 16)
WRONG: dict[str, tuple[str, ...]] = {
    "id": ("", "a b", "a\nb", "a:b", "a{b}", "ü", "a\0b", "a" * 129),
    "version": (*NO_WHOLE_NUMBERS, "0"),
    "class": ("", "urgent", "NORMAL", "normal ", "__index"),
    "tenant": ("", "a b", "a:b", "a/b", "a}b", "t" * 65),
    "bytes": (*NO_WHOLE_NUMBERS, "3", "5"),
    "cost": NO_WHOLE_NUMBERS,
    "seed": ("", "1.5", "seed", "1" * 21, "- 1"),
    "deadline": NO_WHOLE_NUMBERS,
    "delay": NO_WHOLE_NUMBERS,
    "run at": NO_WHOLE_NUMBERS,
    "queue ttl": (*NO_WHOLE_NUMBERS, "0"),
    "result ttl": (*NO_WHOLE_NUMBERS, "0"),
    "idempotency hash": ("a b", "a:b", "a" * 129),
    "body hash": ("a b", "é", "a" * 129),
    "prompt tokens": NO_WHOLE_NUMBERS,
    "output tokens": NO_WHOLE_NUMBERS,
    "allow unknown model": ("", "2", "true", "11"),
}
JOB = "m.0.x1"


def arguments(driver: Driver) -> list[object]:
    """The command of an ordinary submission: its first four words lead to the arguments."""
    return list(submit(driver.prefix, submission(JOB, b"body")).command())


def send(driver: Driver, command: list[object]) -> list[object]:
    answer: list[object] = driver.redis.execute_command(*command)
    return answer


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_that_cannot_be_is_named_and_nothing_is_written(driver: Driver, name: str) -> None:
    before = set(driver.redis.scan_iter(f"{driver.prefix}*"))
    first = len(arguments(driver)) - len(NAMES) - 1
    for value in WRONG[name]:
        command = arguments(driver)
        command[first + NAMES.index(name)] = value
        refusal, named, *_ = send(driver, command)
        assert (refusal, named) == (b"invalid", name.encode()), value
    assert set(driver.redis.scan_iter(f"{driver.prefix}*")) == before


@pytest.mark.parametrize("given", range(len(NAMES) + 1))
def test_too_few_arguments_are_refused(driver: Driver, given: int) -> None:
    command = arguments(driver)
    first = len(command) - len(NAMES) - 1
    assert send(driver, command[: first + given])[0] == b"invalid"
    assert not list(driver.redis.scan_iter(f"{driver.prefix}:job:*"))


def test_the_ordinary_one_is_taken(driver: Driver) -> None:
    """Else the tests above would prove nothing."""
    assert send(driver, arguments(driver))[0] == b"ok"
    assert [job.job_id for job in driver.take("w")] == [JOB]
