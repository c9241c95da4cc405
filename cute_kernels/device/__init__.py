"""Device code that both families share: the kernels and their parts."""

WARP = 32  # lanes
