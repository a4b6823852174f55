from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift_worker.engine.blocks import BlockPool


def content(*letters: str) -> list[bytes]:
    """A chain of names: each stands for all letters up to it."""
    return ["".join(letters[: end + 1]).encode() for end in range(len(letters))]


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of growing, naming, finding, borrowing and releasing leaves the books right.

    The machine keeps what was last written into each block, so that a name that outlives its content shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: dict[str, int] = {}
        self.num_owners = 0
        self.written: dict[int, bytes] = {}
        self.named: dict[str, int] = {}
        self.letters: dict[str, list[str]] = {}

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)

    @rule(num_tokens=st.integers(0, 20))
    def grow_new(self, num_tokens: int) -> None:
        self.num_owners += 1
        self.grow(str(self.num_owners), num_tokens)

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data(), num_tokens=st.integers(0, 20))
    def grow_old(self, data: st.DataObject, num_tokens: int) -> None:
        self.grow(self.somebody(data), num_tokens)

    def somebody(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.num_tokens)))

    def grow(self, owner: str, num_tokens: int) -> None:
        before = self.pool.table(owner)
        if not self.pool.can_grow(owner, num_tokens):
            assert self.pool.num_missing(owner, num_tokens) > self.pool.num_available
            return
        self.pool.grow(owner, num_tokens)
        self.num_tokens[owner] = max(num_tokens, self.num_tokens.get(owner, 0))
        assert self.pool.table(owner)[: len(before)] == before
        for block in self.pool.table(owner)[len(before) :]:
            self.written[block] = b"nothing yet"

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data(), letter=st.sampled_from("xy"))
    def compute(self, data: st.DataObject, letter: str) -> None:
        """The owner's next block becomes whole, with this letter in it."""
        owner = self.somebody(data)
        letters = self.letters.setdefault(owner, [])
        if len(letters) < len(self.pool.table(owner)):
            letters.append(letter)
            name = content(*letters)[-1]
            self.written[self.pool.table(owner)[len(letters) - 1]] = name
            self.pool.name(owner, len(letters) - 1, name)

    @rule(letters=st.lists(st.sampled_from("xy"), min_size=1, max_size=4), borrows=st.booleans())
    def adopt(self, letters: list[str], borrows: bool) -> None:
        blocks = self.pool.match(content(*letters))
        assert [self.written[block] for block in blocks] == content(*letters)[: len(blocks)]
        self.num_owners += 1
        owner, num_available, num_idle = (
            str(self.num_owners),
            self.pool.num_available,
            self.pool.num_idle(blocks),
        )
        if borrows and blocks:
            self.pool.borrow(owner, blocks[-1])
            assert self.pool.borrowed(owner) == blocks[-1]
        shared = blocks[:-1] if borrows else blocks
        self.pool.adopt(owner, shared)
        self.num_tokens[owner] = len(shared) * self.pool.block_size
        self.letters[owner] = letters[: len(shared)]
        assert self.pool.table(owner) == shared
        assert self.pool.num_available == num_available - num_idle

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        owner = self.somebody(data)
        self.pool.give_back(owner)
        assert self.pool.borrowed(owner) is None

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        owner = self.somebody(data)
        self.pool.forget(owner)
        letters = self.letters.get(owner, [])
        assert not set(self.pool.match(content(*letters))) & set(self.pool.table(owner))

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.somebody(data)
        self.pool.release(owner)
        self.pool.release(owner)  # harmless
        del self.num_tokens[owner]
        assert self.pool.table(owner) == ()

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_owned == self.pool.num_blocks
        for owner, num_tokens in self.num_tokens.items():
            assert len(self.pool.table(owner)) == self.pool.blocks_for(num_tokens)

    def teardown(self) -> None:
        if self.num_owners:
            for owner in self.num_tokens:
                self.pool.release(owner)
            self.pool.check()
            assert self.pool.num_available == self.pool.num_blocks


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_last_block_is_not_empty() -> None:
    pool = BlockPool(4, 4)
    pool.grow("a", 5)
    assert len(pool.table("a")) == 2
    assert pool.num_slots("a") == 8
    assert pool.num_missing("a", 8) == 0
    assert pool.num_missing("a", 9) == 1


def test_shared_blocks_stay_until_the_last_owner_goes() -> None:
    pool = BlockPool(4, 2)
    pool.grow("a", 4)
    pool.adopt("b", pool.table("a"))
    pool.release("a")
    assert pool.num_free == 2
    pool.release("b")
    assert pool.num_free == 4


def test_a_recycled_block_loses_its_name() -> None:
    pool = BlockPool(2, 2)
    pool.grow("a", 4)
    for index, name in enumerate(content("x", "y")):
        pool.name("a", index, name)
    pool.release("a")
    assert (pool.num_free, pool.num_cached) == (0, 2)
    pool.grow("b", 2)
    assert len(pool.match(content("x", "y"))) == 1, "the end of a chain goes before its beginning"
    pool.grow("b", 4)
    assert pool.match(content("x", "y")) == ()
    pool.release("b")
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_free_blocks_are_taken_before_cached_ones_and_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(4, 1)
    for owner in "abc":
        pool.grow(owner, 1)
        pool.name(owner, 0, owner.encode())
        pool.release(owner)
    pool.adopt("again", pool.match([b"a"]))
    pool.release("again")
    pool.grow("d", 1)
    assert pool.num_cached == 3
    pool.grow("d", 2)
    assert [bool(pool.match([name])) for name in (b"a", b"b", b"c")] == [True, False, True]


def test_of_two_that_computed_the_same_the_first_keeps_the_name() -> None:
    pool = BlockPool(2, 1)
    pool.grow("a", 1)
    pool.grow("b", 1)
    pool.name("a", 0, b"same")
    pool.name("b", 0, b"same")
    assert pool.match([b"same"]) == pool.table("a")
    pool.release("b")
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.release("a")
    assert (pool.num_free, pool.num_cached) == (1, 1)


@pytest.mark.parametrize("breakage", ["free twice", "free and owned", "lost", "count", "name"])
def test_check_finds_broken_books(breakage: str) -> None:
    pool = BlockPool(4, 2)
    pool.grow("a", 4)
    pool.check()
    if breakage == "free twice":
        pool._free[0] = pool._free[1]
    elif breakage == "free and owned":
        pool._free.append(pool.table("a")[0])
    elif breakage == "lost":
        pool._free.pop()
    elif breakage == "name":
        pool._hashes[pool._free[0]] = b"stale"
    else:
        pool._num_references[pool.table("a")[0]] = -1
    with pytest.raises(AssertionError):
        pool.check()
