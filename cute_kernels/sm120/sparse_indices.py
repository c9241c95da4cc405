"""sparse_indices on the SM120 family: two segments of slots, window and compressed, each with its lengths."""

import cutlass
import cutlass.cute as cute

from cute_kernels.compile.spec import SparseIndicesSpec
from cute_kernels.device.fakes import fake_table, fake_vector
from cute_kernels.device.slots import Divisor, Pool
from cute_kernels.device.sparse_indices import WINDOW_VECTOR, Inputs, Outputs, SparseIndices, Work, fake_inputs
from cute_kernels.kv_format import WINDOW


class Segments:
    """Host side: entries are slots (page * page_rows + offset), lengths count valid entries only."""

    def __init__(self, spec: SparseIndicesSpec) -> None:
        self.names = (*spec.argument_names, "stream")
        self.kernel = SparseIndices(source=spec.source, vector=spec.vector_bytes // 4, length_base=0, pdl=spec.pdl)

    @cute.jit
    def __call__(self, *arguments):
        given = dict(zip(self.names, arguments, strict=True))
        compressed, ratio = None, None
        if cutlass.const_expr("compressed_pages" in given):
            page_rows = given["compressed_page_rows"]
            compressed = Pool.of(given["compressed_pages"], page_rows, page_rows, given.get("compressed_block_table"))
        if cutlass.const_expr("ratio" in given):
            ratio = Divisor.of(given["ratio"])
        page_rows = given["window_page_rows"]
        window = Pool.of(given["window_pages"], page_rows, page_rows, given["window_block_table"])
        inputs = Inputs.of(given)
        outputs = Outputs(given["window_table"], given["window_lengths"], given.get("compressed_table"), given.get("compressed_lengths"))
        self.kernel.launch(Work(inputs, outputs, window, compressed, ratio), given["independent"], given["stream"])


def trace(spec: SparseIndicesSpec):
    """The host function of a spec and its fake arguments, in the spec's order.

    window_table int32 [rows, 128]; compressed_table int32 [rows, width], rows and base aligned to `vector_bytes`;
    window_lengths, compressed_lengths int32 [rows]
    """
    vector, rows = spec.vector_bytes // 4, cute.sym_int()
    fakes = {
        **fake_inputs(vector),
        "window_table": fake_table(rows, WINDOW, WINDOW_VECTOR),
        "window_lengths": fake_vector(rows),
        "compressed_table": fake_table(rows, cute.sym_int(divisibility=vector), vector),
        "compressed_lengths": fake_vector(rows),
    }
    return Segments(spec), [fakes[name] for name in spec.argument_names]
