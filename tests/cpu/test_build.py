"""How much shared memory a launch takes, read from the host code that the DSL lowers it to."""

import pytest

from cute_kernels.compile.build import _dynamic_shared
from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.errors import CompileError
from cute_kernels.target import Target

SPEC = CompressStoreSpec(Target.named("sm_100f"), ratio=4, kv_format="bf16", save="policy")


def host(*lines: str, size: str = "%9") -> str:
    """A host function that stores a number into the third field of its launch configuration."""
    kind = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    field = f"    %8 = llvm.getelementptr %7[0, 2] : (!llvm.ptr) -> !llvm.ptr, {kind}"
    return "\n".join(["  llvm.func @host(%arg0: i32) {", *lines, field, f"    llvm.store {size}, %8 : i64, !llvm.ptr", "  }", ""])


CONSTANT = "    %9 = llvm.mlir.constant(4096 : i64) : i64"
CHOICE = (
    "    %1 = llvm.mlir.constant(6144 : i32) : i32",
    "    %2 = llvm.mlir.constant(18432 : i32) : i32",
    "    %3 = llvm.mlir.constant(70560 : i32) : i32",
    "    %5 = llvm.select %4, %1, %2 : i1, i32",
    "    %6 = llvm.add %5, %3 : i32",
    "    %9 = llvm.sext %6 : i32 to i64",
)


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("", 0),
        (host(CONSTANT), 4096),
        (host(*CHOICE), 18432 + 70560),
        (host(CONSTANT) + host(*CHOICE), 18432 + 70560),
        (host(*CHOICE) + host(CONSTANT), 18432 + 70560),
    ],
)
def test_the_most_that_a_launch_may_take(code: str, most: int) -> None:
    assert _dynamic_shared(code, SPEC) == most


@pytest.mark.parametrize(
    "code", [host(), host("    %9 = llvm.sext %arg0 : i32 to i64"), host("    %9 = llvm.mul %1, %2 : i64"), host(*CHOICE[1:])]
)
def test_other_numbers_are_refused(code: str) -> None:
    with pytest.raises(CompileError, match="no choice between compile-time constants"):
        _dynamic_shared(code, SPEC)
