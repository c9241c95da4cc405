"""Device code that both families share: the kernels and their parts."""
