"""`gather_upconvert` for the SM100 family: every format that dense prefill reads; nothing in it depends on the family."""

from cute_kernels.device.gather_upconvert import trace as trace

__all__ = ["trace"]
