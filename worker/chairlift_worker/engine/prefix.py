"""Names for blocks by what they hold: a chain of hashes over a sequence's whole blocks.

    root ──→ hash(block 0) ──→ hash(block 1) ──→ …      each one covers all tokens before it too

KV depends on every token before it and on who computes it, so two blocks are interchangeable iff their
chains are equal from the root on. The root says who computes it, in fields that cannot run together.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

_DIGEST_BYTES = 16


class CacheIdentity(NamedTuple):
    """Everything besides the tokens that KV depends on, and whom it may be shared with."""

    model: str = ""
    """Fingerprint of weights, dtype and limits."""
    adapter: str = ""
    """Digest of the weights on top of the model's; empty for none."""
    salt: str = ""
    """Jobs with different salts share nothing, so that nobody can time what others asked."""

    def root(self) -> bytes:
        """The chain's beginning; each field goes in with its name and length."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for name, value in self._asdict().items():
            for part in (name.encode(), value.encode("utf-8", "surrogatepass")):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.digest()


class PrefixHashes:
    """The chain of one sequence, hashed as far as it was asked for and no token twice."""

    def __init__(self, identity: CacheIdentity, block_size: int) -> None:
        self._block_size = block_size
        self._last = identity.root()
        self._hashes: list[bytes] = []

    def of(self, token_ids: Seq[int]) -> Seq[bytes]:
        """One hash for each whole block of `token_ids`, which must begin with those of the last call."""
        size = self._block_size
        for index in range(len(self._hashes), len(token_ids) // size):
            block = array("q", token_ids[index * size : (index + 1) * size])
            digest = hashlib.blake2b(self._last, digest_size=_DIGEST_BYTES)
            digest.update(block.tobytes())
            self._last = digest.digest()
            self._hashes.append(self._last)
        return self._hashes
