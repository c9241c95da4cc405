"""`convert_indices` for the SM120 family: slots are the same for both, so nothing in it depends on the family."""

from cute_kernels.device.convert_indices import trace as trace

__all__ = ["trace"]
