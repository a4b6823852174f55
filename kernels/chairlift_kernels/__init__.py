"""The ops a model is computed with. What each promises stands in `reference.py`."""

from chairlift_kernels.dispatch import Attention, paged_attention, prepare_attention
from chairlift_kernels.reference import rms_norm, rope, silu_mul, write_kv

__all__ = ["Attention", "paged_attention", "prepare_attention", "rms_norm", "rope", "silu_mul", "write_kv"]
