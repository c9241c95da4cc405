"""Global memory by 64-bit byte address: vectors in one access, scalars, and the addresses of tensor rows."""

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp

STREAM = CacheEvictionPriority.NO_ALLOCATE  # read once: leave L1 to what is read again
KEEP = CacheEvictionPriority.EVICT_NORMAL
LINE = 128  # bytes of a line of L2
# L2 policies for all of a copy's lines, as CUTLASS encodes them (`TMA::CacheHintSm90`): they go before any others; as usual.
EVICT_FIRST = 0x12F0000000000000  # what createpolicy.fractional makes, too
EVICT_NORMAL = 0x1000000000000000


def base_address(tensor: cute.Tensor) -> Int64:
    """Byte address of a tensor's first element."""
    return Int64(tensor.iterator.toint())


def byte_stride(tensor: cute.Tensor, mode: int) -> Int64:
    """Stride of one mode in bytes, 64-bit: whatever is multiplied by it cannot overflow."""
    return Int64(tensor.stride[mode]) * (tensor.element_type.width // 8)


def at(address: Int64, dtype, count: int, alignment: int = 0) -> cute.Tensor:
    """`count` elements of global memory at a byte address; `alignment` in bytes, by default that of the whole vector."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment or count * dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(count))


def policy_of(streaming: bool) -> dict[str, Int64]:
    """The L2 policy of a copy as its keyword argument."""
    return {"cache_policy": Int64(EVICT_FIRST)} if streaming else {}


def policy_where(streaming: Boolean) -> Int64:
    """The L2 policy of a copy, known at run time only."""
    return Int64(cutlass.select_(streaming, Int64(EVICT_FIRST), Int64(EVICT_NORMAL)))


def load_vector(address: Int64, fragment: cute.Tensor, priority=KEEP, streaming: bool = False) -> None:
    """Fill a register fragment from consecutive bytes in one access (two, where the architecture has no wide enough one).

    priority    in L1
    streaming   the lines leave the L2 first
    """
    count = cute.size(fragment)
    dtype = fragment.element_type
    atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=count * dtype.width, l1c_evict_priority=priority)
    cute.copy(atom, at(address, dtype, count), fragment, **policy_of(streaming))


def store_vector(address: Int64, fragment: cute.Tensor, streaming: bool = False) -> None:
    """Write a register fragment to consecutive bytes in one access (two, where the architecture has no wide enough one).

    streaming   the lines leave the L2 first
    """
    count = cute.size(fragment)
    dtype = fragment.element_type
    atom = cute.make_copy_atom(CopyR2GOp(), dtype, num_bits_per_copy=count * dtype.width)
    cute.copy(atom, fragment, at(address, dtype, count), **policy_of(streaming))


def load_below(base: Int64, column: Int32, id: Int32, limit: Int32) -> Int32:
    """Word `column` of global memory from address `base` on where 0 <= id < limit, elsewhere -1.

    Written as PTX: for a branch around the load ptxas emits one instruction more than a predicate takes. The address is formed inside it,
    which leaves `convert_indices` fewer registers (44 to 48 by spec, cross-compiled for sm_90a).
    """
    text = (
        "{\n.reg .pred p;\n.reg .b64 a;\nsetp.lt.u32 p, $3, $4;\nmad.wide.u32 a, $2, 4, $1;\nmov.b32 $0, -1;\n@p ld.global.b32 $0, [a];\n}"
    )
    operands = [base.ir_value(), column.ir_value(), id.ir_value(), limit.ir_value()]
    return Int32(llvm.inline_asm(Int32.mlir_type, operands, text, "=&r,l,r,r,r", has_side_effects=True))


def take_number(counter: Int64, last: Int32) -> Int32:
    """The number in a word of global memory, which goes on to the next one, from `last` to 0; no order of other accesses."""
    operands = [counter.ir_value(), last.ir_value()]
    return Int32(
        llvm.inline_asm(Int32.mlir_type, operands, "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r", has_side_effects=True)
    )


def copy_bulk(address: Int64, target, size: int | Int32, barrier, cache_policy: Int64 | None = None) -> None:
    """Start one asynchronous copy of `size` bytes from global to this block's shared memory, counted by `barrier`.

    The DSL's copy atom names its target as an address of the cluster, by an instruction that SM120 objects shall not hold.

    cache_policy   the L2 policy of the lines
    """
    operands, kinds, hint, policy, count = [Int32(target.toint()), address, Int32(barrier.toint())], "r,l,r", "", "", str(size)
    if not isinstance(size, int):
        operands, kinds, count = [*operands, size], f"{kinds},r", f"${len(operands)}"
    if cache_policy is not None:
        hint, policy = ".L2::cache_hint", f", ${len(operands)}"
        operands, kinds = [*operands, cache_policy], f"{kinds},l"
    llvm.inline_asm(
        None,
        [operand.ir_value() for operand in operands],
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes{hint} [$0], [$1], {count}, [$2]{policy};",
        kinds,
        has_side_effects=True,
    )


def prefetch(address: Int64, count: int) -> None:
    """Have `count` bytes brought into L2, without waiting for them; address and count are multiples of 16."""
    llvm.inline_asm(None, [address.ir_value()], f"cp.async.bulk.prefetch.L2.global [$0], {count};", "l", has_side_effects=True)


def prefetch_line(address: Int64) -> None:
    """Have the line of an address brought into L2, without waiting for it.

    For threads that have nothing else to do: on an H200 (2026-11-30) most steps of `compress_store` took 0.1 to 0.4 µs less by lines than
    where a thread had each row brought by `prefetch`.
    """
    llvm.inline_asm(None, [address.ir_value()], "prefetch.global.L2 [$0];", "l", has_side_effects=True)


def in_range(value, limit) -> Boolean:
    """0 <= value < limit for a signed value."""
    return (value >= 0) & (value < limit)


def extent(tensor: cute.Tensor) -> Int32:
    """Length of a tensor's first mode."""
    return Int32(tensor.shape[0])
