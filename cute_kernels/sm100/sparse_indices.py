"""sparse_indices on the SM100 family: one combined table of storage rows, 128 window columns and then the compressed ones."""

import cutlass
import cutlass.cute as cute

from cute_kernels.compile.spec import SparseIndicesSpec
from cute_kernels.device.fakes import fake_table, fake_vector
from cute_kernels.device.slots import Divisor, Pool
from cute_kernels.device.sparse_indices import Inputs, Outputs, SparseIndices, Work, fake_inputs
from cute_kernels.kv_format import WINDOW


class CombinedTable:
    """Host side: entries are storage rows (page * span + offset), lengths count the 128 window columns."""

    def __init__(self, spec: SparseIndicesSpec) -> None:
        self.names = (*spec.argument_names, "stream")
        self.kernel = SparseIndices(source=spec.source, vector=spec.vector_bytes // 4, length_base=WINDOW, pdl=spec.pdl)

    @cute.jit
    def __call__(self, *arguments):
        given = dict(zip(self.names, arguments, strict=True))
        table = given["table"]
        rows, columns = table.shape
        compressed_part, compressed, ratio = None, None, None
        if cutlass.const_expr("compressed_pages" in given):
            part = cute.make_layout((rows, columns - WINDOW), stride=table.stride)
            compressed_part = cute.make_tensor(table.iterator + WINDOW, part)
            compressed = Pool.of(
                given["compressed_pages"], given["compressed_page_rows"], given["compressed_span"], given.get("compressed_block_table")
            )
        if cutlass.const_expr("ratio" in given):
            ratio = Divisor.of(given["ratio"])
        window_part = cute.make_tensor(table.iterator, cute.make_layout((rows, WINDOW), stride=table.stride))
        block_table = given["window_block_table"]
        window = Pool.of(given["window_pages"], given["window_page_rows"], given["window_span"], block_table)
        inputs = Inputs.of(given)
        outputs = Outputs(window_part, None, compressed_part, given["lengths"])
        self.kernel.launch(Work(inputs, outputs, window, compressed, ratio), given["independent"], given["stream"])


def trace(spec: SparseIndicesSpec):
    """The host function of a spec and its fake arguments, in the spec's order.

    table int32 [rows, 128 + width], rows and base aligned to `vector_bytes`; lengths int32 [rows]
    """
    vector, rows = spec.vector_bytes // 4, cute.sym_int()
    fakes = {
        **fake_inputs(vector),
        "table": fake_table(rows, cute.sym_int(divisibility=vector), vector),
        "lengths": fake_vector(rows),
    }
    return CombinedTable(spec), [fakes[name] for name in spec.argument_names]
