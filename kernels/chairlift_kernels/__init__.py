"""The ops a model is computed with. What each promises stands in `reference.py`.

CPU tensors take the paths of `cpu.py` where it has one; all others the reference.
"""

from chairlift_kernels.reference import paged_attention, rms_norm, rope, silu_mul, write_kv

__all__ = ["paged_attention", "rms_norm", "rope", "silu_mul", "write_kv"]
