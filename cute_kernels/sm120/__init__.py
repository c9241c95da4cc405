"""The SM120 family (12.0, 12.1): what its kernels are built from."""
