"""The SM100 family (10.0, 10.3): what its kernels are built from."""
