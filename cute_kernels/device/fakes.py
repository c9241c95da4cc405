"""Fake tensors of the kinds that most kernels take: what the compiled functions accept, checked on every call.

An extent or a stride given as one symbol must agree wherever the symbol stands; each call of `cute.sym_int` makes a new one.
"""

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_tensor


def fake_vector(length: Any, dtype: Any = Int32) -> Any:
    """[length] numbers, one after the other, aligned to one of them."""
    return make_fake_tensor(dtype, (length,), stride=(1,), assumed_align=dtype.width // 8)


def fake_table(rows: Any, columns: Any, vector: int = 1) -> Any:
    """int32 [rows, columns] of any row stride, all rows aligned to `vector` entries."""
    return make_fake_tensor(Int32, (rows, columns), stride=(cute.sym_int64(divisibility=vector), 1), assumed_align=4 * vector)
