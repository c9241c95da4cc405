"""Device code of `ScaleSpec`."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

THREADS = 128


class Scale:
    def __init__(self, factor: int, pdl: bool):
        self.factor, self.pdl = factor, pdl

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, add: Float32, stream):
        self.kernel(mX, mY, add).launch(
            grid=[cute.ceil_div(mX.shape[0], THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor, add: Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        i = block * THREADS + thread
        if i < mX.shape[0]:
            mY[i] = mX[i] * Float32(self.factor) + add


def trace(spec):
    n = cute.sym_int()
    x = make_fake_tensor(Float32, (n,), stride=(1,), assumed_align=16)
    y = make_fake_tensor(Float32, (n,), stride=(1,), assumed_align=16)
    return Scale(spec.factor, spec.pdl), (x, y, Float32(0.0))
