"""Kernel specs, the compile cache and AOT packs. Imports no kernel and no cutlass until something must be compiled."""
