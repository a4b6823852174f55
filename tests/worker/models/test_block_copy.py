"""A sequence that goes on in the middle of another one's block: both runners copy before they write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chairlift_worker.engine.batch import Chunk
from chairlift_worker.models.decoder import DecoderRunner
from chairlift_worker.models.fallback import FallbackRunner
from tiny_model import TINY_MODEL

TEXT = (5, 9, 30, 7, 11, 40)


def load(kind: type[DecoderRunner] | type[FallbackRunner]) -> DecoderRunner | FallbackRunner:
    return kind.load(
        Path(TINY_MODEL), num_blocks=12, block_size=4, dtype=torch.float64, device=torch.device("cpu")
    )


@pytest.mark.parametrize("kind", [DecoderRunner, FallbackRunner])
def test_a_copied_block_is_as_good_as_a_computed_one(
    kind: type[DecoderRunner] | type[FallbackRunner],
) -> None:
    runner = load(kind)
    whole = runner.forward([Chunk((*TEXT, 3), 0, (9, 8), 1)])
    other = runner.forward([Chunk((*TEXT, 4), 0, (7, 6), 1)])
    runner.forward([Chunk(TEXT, 0, (3, 1), 0)])
    # The source itself goes on in the same step.
    both = runner.forward([Chunk((3,), 6, (3, 1), 1), Chunk((4,), 6, (3, 5), 1, copy_from=1)])
    torch.testing.assert_close(both, torch.cat([whole, other]))
    again = runner.forward([Chunk((8,), 7, (3, 5), 1)])
    torch.testing.assert_close(again, runner.forward([Chunk((*TEXT, 4, 8), 0, (7, 6), 1)]))
