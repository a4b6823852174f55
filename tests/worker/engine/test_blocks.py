from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift_worker.engine.blocks import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of growing, sharing and releasing leaves the books right."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: dict[str, int] = {}
        self.num_owners = 0

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
        self.grow(data.draw(st.sampled_from(sorted(self.num_tokens))), num_tokens)

    def grow(self, owner: str, num_tokens: int) -> None:
        before = self.pool.table(owner)
        if not self.pool.can_grow(owner, num_tokens):
            assert self.pool.num_missing(owner, num_tokens) > self.pool.num_free
            return
        self.pool.grow(owner, num_tokens)
        self.num_tokens[owner] = max(num_tokens, self.num_tokens.get(owner, 0))
        assert self.pool.table(owner)[: len(before)] == before

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.num_tokens)))
        num_blocks = data.draw(st.integers(0, len(self.pool.table(source))))
        self.num_owners += 1
        owner, num_free = str(self.num_owners), self.pool.num_free
        self.pool.share(owner, source, num_blocks * self.pool.block_size)
        self.num_tokens[owner] = num_blocks * self.pool.block_size
        assert self.pool.table(owner) == self.pool.table(source)[:num_blocks]
        assert self.pool.num_free == num_free

    @precondition(lambda self: self.num_tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.num_tokens)))
        self.pool.release(owner)
        self.pool.release(owner)  # harmless
        del self.num_tokens[owner]
        assert self.pool.table(owner) == ()

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check()
        assert self.pool.num_free + self.pool.num_owned == self.pool.num_blocks
        for owner, num_tokens in self.num_tokens.items():
            assert len(self.pool.table(owner)) == self.pool.blocks_for(num_tokens)

    def teardown(self) -> None:
        if self.num_owners:
            for owner in self.num_tokens:
                self.pool.release(owner)
            self.pool.check()
            assert self.pool.num_free == self.pool.num_blocks


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
    pool.share("b", "a", 4)
    pool.release("a")
    assert pool.num_free == 2
    pool.release("b")
    assert pool.num_free == 4


@pytest.mark.parametrize("breakage", ["free twice", "free and owned", "lost", "count"])
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
    else:
        pool._num_references[pool.table("a")[0]] = -1
    with pytest.raises(AssertionError):
        pool.check()
