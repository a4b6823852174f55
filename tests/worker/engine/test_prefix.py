from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chairlift_worker.engine.prefix import CacheIdentity, PrefixHashes


def test_fields_do_not_run_together() -> None:
    identities = [
        CacheIdentity("ab", "c", ""),
        CacheIdentity("a", "bc", ""),
        CacheIdentity("", "abc", ""),
        CacheIdentity("abc", "", ""),
        CacheIdentity("", "", "abc"),
        CacheIdentity("ab", "", "c"),
        CacheIdentity("a\0", "b", ""),
        CacheIdentity("a", "\0b", ""),
        CacheIdentity(),
    ]
    assert len({identity.root() for identity in identities}) == len(identities)
    assert CacheIdentity("a", "b", "c").root() == CacheIdentity("a", "b", "c").root()


@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 7), st.integers(0, 2**32))
def test_hashes_do_not_depend_on_when_they_were_asked_for(tokens: list[int], size: int, seed: int) -> None:
    at_once = list(PrefixHashes(CacheIdentity("m"), size).of(tokens))
    assert len(at_once) == len(tokens) // size
    chance, slowly = random.Random(seed), PrefixHashes(CacheIdentity("m"), size)
    end = 0
    while end < len(tokens):
        end = min(len(tokens), end + chance.randint(1, 5))
        slowly.of(tokens[:end])
    assert list(slowly.of(tokens)) == at_once
    assert list(slowly.of([*tokens, 1, 2, 3]))[: len(at_once)] == at_once


def test_a_hash_covers_everything_before_it() -> None:
    def names(*tokens: int, salt: str = "") -> list[bytes]:
        return list(PrefixHashes(CacheIdentity("m", salt=salt), 2).of(tokens))

    assert names(1, 2, 3, 4)[0] == names(1, 2, 9, 9)[0]
    assert names(1, 2, 3, 4)[1] != names(1, 9, 3, 4)[1]
    assert names(1, 2, 1, 2)[0] != names(1, 2, 1, 2)[1]
    assert names(1, 2)[0] != names(1, 2, salt="tenant")[0]
