"""Arguments of the compressor: their names in the kernel, and what the compiled function promises to accept, checked on every call."""

from typing import Any, NamedTuple

from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.compile.spec import CompressStoreSpec
from cute_kernels.device.row_writers import CACHE_TYPES
from cute_kernels.kv_format import FORMATS, HEAD_DIM, ROPE_DIM
from cute_kernels.scratch import WORDS


class Arguments(NamedTuple):
    """Run-time arguments; None where the kernel has no such argument (`CompressStoreSpec.argument_names`)."""

    state: Any
    state_block_table: Any
    positions: Any
    token_to_req: Any
    state_slots: Any
    kv_slots: Any
    norm_weight: Any
    cos_sin: Any
    kv_cache: Any
    eps: Any
    kv_score: Any = None
    ape: Any = None
    seq_lens: Any = None
    inverse_kv_scale: Any = None
    rollback: Any = None
    prefix_stride: Any = None
    scratch: Any = None
    independent: Any = None

    def may_meet(self) -> Boolean:
        """Whether blocks may meet in `scratch`: there is one, and no other launch that may use it runs beside this one."""
        return (self.independent == 0) & (Int32(self.scratch.shape[0]) >= WORDS)


def fake_arguments(spec: CompressStoreSpec, width: int) -> list[Any]:
    """Fake arguments in the order of `spec.argument_names`. `width` is W, half a state row.

    Strides of `kv_score`, `state`, block table and cache are run-time values. The per-row tensors share no length: rows past the
    end of any of them are padding. `spec.vector_bytes` is the alignment of everything that is accessed by vectors.
    """
    align, fmt = spec.vector_bytes, FORMATS[spec.kv_format]
    # The packed row stride is nominal: 584, a multiple of 8 bytes only, and used for nothing.
    cache_strides = (cute.sym_int64(divisibility=align), fmt.row_elements, 1) if fmt.packed else ()

    def tensor(dtype: Any, *shape: Any, strides: tuple = (), vectors: bool = False) -> Any:
        size = dtype.width // 8
        divisor = align // size if vectors else 1
        strides = (*(cute.sym_int64(divisibility=divisor) for _ in range(len(shape) - 1)), 1) if not strides else strides
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=align if vectors else size)

    def length() -> Any:
        return cute.sym_int()

    made = {
        "kv_score": lambda: tensor(Float32, length(), 2 * width, vectors=True),
        "ape": lambda: tensor(Float32, spec.ratio, width, strides=(width, 1), vectors=True),
        "state": lambda: tensor(Float32, length(), length(), 2 * width, vectors=True),
        "state_block_table": lambda: tensor(Int32, length(), length()),
        "positions": lambda: tensor(Int64, length()),
        "token_to_req": lambda: tensor(Int32, length()),
        "state_slots": lambda: tensor(Int64, length()),
        "kv_slots": lambda: tensor(Int64, length()),
        "seq_lens": lambda: tensor(Int32, length()),
        "norm_weight": lambda: tensor(BFloat16, HEAD_DIM, vectors=True),
        "cos_sin": lambda: tensor(Float32, length(), ROPE_DIM),
        "kv_cache": lambda: tensor(CACHE_TYPES[fmt.name], length(), length(), fmt.row_elements, strides=cache_strides, vectors=True),
        "scratch": lambda: make_fake_tensor(Int32, (length(),), stride=(1,), assumed_align=16),
        "eps": lambda: Float32(0.0),
        "inverse_kv_scale": lambda: Float32(1.0),
        "rollback": lambda: Int32(0),
        "prefix_stride": lambda: Int32(0),
        "independent": lambda: Int32(0),
    }
    return [made[name]() for name in spec.argument_names]
