"""`python -m cute_kernels`."""

from cute_kernels.cli import main

if __name__ == "__main__":
    main()
