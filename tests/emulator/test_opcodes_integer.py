"""Integer and bit instructions against hand-derived results: wrap, shift limits, signs, every comparison."""

from __future__ import annotations

import pytest

from ptx_emulator import UnsupportedInstruction
from tests.emulator.one_opcode import check, execute

M1 = 0xFFFFFFFF
MIN, MAX = 0x80000000, 0x7FFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF
MIN64 = 1 << 63

TABLE = {
    # text: rows of (a, b, ..., expected)
    "add.u32 d32, a32, b32;": [(M1, 1, 0), (MAX, 1, MIN), (5, 7, 12)],
    "add.s32 d32, a32, b32;": [(MIN, M1, MAX)],
    "add.sat.s32 d32, a32, b32;": [(MAX, 1, MAX), (MIN, M1, MIN), (3, M1, 2)],
    "add.s64 d64, a64, b64;": [(M64, 1, 0), (MIN64, M64, MIN64 - 1)],
    "add.u16 d16, a16, b16;": [(0xFFFF, 2, 1)],
    "sub.u32 d32, a32, b32;": [(0, 1, M1), (MIN, 1, MAX)],
    "sub.sat.s32 d32, a32, b32;": [(MIN, 1, MIN), (MAX, M1, MAX)],
    "sub.s64 d64, a64, b64;": [(0, 1, M64)],
    "mul.lo.u32 d32, a32, b32;": [(0x10000, 0x10000, 0), (M1, M1, 1)],
    "mul.lo.s64 d64, a64, b64;": [(1 << 32, 1 << 32, 0), (M64, 3, M64 - 2)],
    "mul.hi.u32 d32, a32, b32;": [(M1, M1, 0xFFFFFFFE), (0x10000, 0x10000, 1)],
    "mul.hi.s32 d32, a32, b32;": [(M1, M1, 0), (MIN, MIN, 0x40000000), (MIN, 2, M1)],
    "mul.hi.u64 d64, a64, b64;": [(M64, M64, M64 - 1), (1 << 32, 1 << 32, 1), (0x123456789ABCDEF0, 0x0FEDCBA987654321, 0x0121FA00AD77D742)],
    "mul.hi.s64 d64, a64, b64;": [(M64, M64, 0), (MIN64, MIN64, 1 << 62), (MIN64, 2, M64)],
    "mul.wide.u32 d64, a32, b32;": [(M1, M1, 0xFFFFFFFE00000001)],
    "mul.wide.s32 d64, a32, b32;": [(M1, 5, M64 - 4), (MIN, MIN, 1 << 62)],
    "mul.wide.u16 d32, a16, b16;": [(0xFFFF, 0xFFFF, 0xFFFE0001)],
    "mul.wide.s16 d32, a16, b16;": [(0xFFFF, 3, M1 - 2)],
    "mad.lo.s32 d32, a32, b32, c32;": [(M1, M1, 1, 2), (0x10000, 0x10000, 9, 9)],
    "mad.hi.u32 d32, a32, b32, c32;": [(M1, M1, 2, 0)],
    "mad.wide.u32 d64, a32, b32, c64;": [(M1, M1, 0x1FFFFFFFF, 0)],
    "mad.wide.s32 d64, a32, b32, c64;": [(M1, 8, 8, 0)],
    "mad.lo.u64 d64, a64, b64, c64;": [(M64, 2, 3, 1)],
    "div.u32 d32, a32, b32;": [(M1, 2, MAX), (7, 9, 0)],
    "div.s32 d32, a32, b32;": [(-7, 2, -3 & M1), (7, -2, -3 & M1), (-7, -2, 3), (MIN, 1, MIN)],
    "div.s64 d64, a64, b64;": [(-9, 4, -2 & M64), (MIN64, -1, MIN64)],
    "rem.s32 d32, a32, b32;": [(-7, 2, M1), (7, -2, 1), (-8, 2, 0)],
    "rem.u64 d64, a64, b64;": [(M64, 10, 5)],
    "abs.s32 d32, a32;": [(M1, 1), (MIN, MIN), (5, 5)],
    "neg.s32 d32, a32;": [(1, M1), (MIN, MIN)],
    "neg.s64 d64, a64;": [(1, M64)],
    "min.u32 d32, a32, b32;": [(M1, 1, 1)],
    "min.s32 d32, a32, b32;": [(M1, 1, M1), (MIN, MAX, MIN)],
    "max.u32 d32, a32, b32;": [(M1, 1, M1)],
    "max.s32 d32, a32, b32;": [(M1, 1, 1)],
    "max.s64 d64, a64, b64;": [(M64, 0, 0)],
    "max.u16 d16, a16, b16;": [(0xFFFF, 1, 0xFFFF)],
    "sad.s32 d32, a32, b32, c32;": [(M1, 4, 10, 15)],
    "and.b32 d32, a32, b32;": [(0xF0F0, 0xFF00, 0xF000)],
    "or.b64 d64, a64, b64;": [(1 << 63, 1, (1 << 63) | 1)],
    "xor.b16 d16, a16, b16;": [(0xFFFF, 0x0F0F, 0xF0F0)],
    "not.b32 d32, a32;": [(0, M1)],
    "not.b64 d64, a64;": [(1, M64 - 1)],
    "cnot.b32 d32, a32;": [(0, 1), (7, 0)],
    "and.pred d1, a1, b1;": [(1, 1, 1), (1, 0, 0)],
    "or.pred d1, a1, b1;": [(0, 0, 0), (1, 0, 1)],
    "xor.pred d1, a1, b1;": [(1, 1, 0), (1, 0, 1)],
    "and.pred d1, a1, !b1;": [(1, 0, 1), (1, 1, 0)],
    "not.pred d1, a1;": [(0, 1), (1, 0)],
    # Shift amounts past the width: zeros, or the sign.
    "shl.b32 d32, a32, b32;": [(1, 31, MIN), (1, 32, 0), (M1, M1, 0), (3, 0, 3)],
    "shl.b64 d64, a64, b32;": [(1, 63, MIN64), (1, 64, 0), (1, 33, 1 << 33)],
    "shl.b16 d16, a16, b32;": [(1, 15, 0x8000), (1, 16, 0)],
    "shr.u32 d32, a32, b32;": [(MIN, 31, 1), (MIN, 32, 0), (M1, 100, 0)],
    "shr.s32 d32, a32, b32;": [(MIN, 31, M1), (MIN, 32, M1), (MIN, M1, M1), (MAX, 40, 0)],
    "shr.b32 d32, a32, b32;": [(MIN, 4, 0x08000000)],
    "shr.s64 d64, a64, b32;": [(MIN64, 63, M64), (MIN64, 200, M64), (1 << 62, 62, 1)],
    "shr.u64 d64, a64, b32;": [(M64, 63, 1), (M64, 64, 0)],
    "shf.l.wrap.b32 d32, a32, b32, c32;": [(0x80000000, 1, 1, 3), (5, 6, 32, 6), (0xF0000000, 0, 36, 0xF)],
    "shf.l.clamp.b32 d32, a32, b32, c32;": [(5, 6, 32, 5), (5, 6, 99, 5), (0x80000000, 1, 1, 3)],
    "shf.r.wrap.b32 d32, a32, b32, c32;": [(1, 1, 1, 0x80000000), (5, 6, 32, 5)],
    "shf.r.clamp.b32 d32, a32, b32, c32;": [(5, 6, 32, 6), (5, 6, 77, 6)],
    "bfe.u32 d32, a32, b32, c32;": [(0xABCD1234, 8, 8, 0x12), (M1, 31, 5, 1), (M1, 0, 0, 0), (M1, 0, 32, M1), (M1, 40, 4, 0)],
    "bfe.s32 d32, a32, b32, c32;": [(0x00008000, 8, 8, 0xFFFFFF80), (MIN, 31, 4, M1), (0x70, 4, 4, 7), (M1, 3, 0, 0), (MIN, 99, 5, M1)],
    "bfe.u64 d64, a64, b32, c32;": [(0xFF << 40, 40, 8, 0xFF)],
    "bfe.s64 d64, a64, b32, c32;": [(1 << 63, 60, 4, (-8) & M64)],
    "bfi.b32 d32, a32, b32, c32, e32;": [
        (0xF, 0, 4, 4, 0xF0),
        (M1, 0, 28, 8, 0xF0000000),
        (5, 9, 0, 0, 9),
        (1, M1, 0, 32, 1),
        (1, 7, 40, 4, 7),
    ],
    "bfi.b64 d64, a64, b64, c32, e32;": [(0xF, M64, 60, 2, 0xFFFFFFFFFFFFFFFF)],
    "bmsk.clamp.b32 d32, a32, b32;": [(4, 8, 0xFF0), (28, 8, 0xF0000000), (40, 1, 0)],
    "bmsk.wrap.b32 d32, a32, b32;": [(36, 8, 0xFF0), (4, 32, 0)],
    "szext.wrap.s32 d32, a32, b32;": [(0x80, 8, 0xFFFFFF80), (0x7F, 8, 0x7F)],
    "szext.clamp.u32 d32, a32, b32;": [(0xFFF, 8, 0xFF), (M1, 40, M1)],
    "popc.b32 d32, a32;": [(0, 0), (M1, 32), (0x80000001, 2)],
    "popc.b64 d32, a64;": [(M64, 64)],
    "clz.b32 d32, a32;": [(0, 32), (1, 31), (MIN, 0)],
    "clz.b64 d32, a64;": [(0, 64), (1, 63)],
    "bfind.u32 d32, a32;": [(0, M1), (1, 0), (MIN, 31)],
    "bfind.s32 d32, a32;": [(M1, M1), (MIN, 30), (0xFFFFFFFE, 0)],
    "bfind.shiftamt.u32 d32, a32;": [(1, 31), (MIN, 0), (0, M1)],
    "brev.b32 d32, a32;": [(1, MIN), (0x0000FFFF, 0xFFFF0000), (0x12345678, 0x1E6A2C48)],
    "brev.b64 d64, a64;": [(1, MIN64)],
    "lop3.b32 d32, a32, b32, c32, 0x96;": [(0b1100, 0b1010, 0b0110, 0b0000), (1, 1, 1, 1)],
    "lop3.b32 d32, a32, b32, c32, 0xCA;": [(0xFF00, 0x1234, 0xABCD, 0x12CD)],
    "lop3.b32 d32, a32, b32, c32, 0xE8;": [(0b11110000, 0b11001100, 0b10101010, 0b11101000)],
    "prmt.b32 d32, a32, b32, c32;": [
        (0x33221100, 0x77665544, 0x3210, 0x33221100),
        (0x33221100, 0x77665544, 0x7654, 0x77665544),
        (0x33221100, 0x77665544, 0x0123, 0x00112233),
        (0x80000000, 0x0000007F, 0xBBBC, 0xFFFFFF00),  # bit 3 of a selector copies the sign of its byte
        (0x33221180, 0, 0x0008, 0x808080FF),
    ],
    "selp.b32 d32, a32, b32, c1;": [(1, 2, 1, 1), (1, 2, 0, 2)],
    "slct.b32.s32 d32, a32, b32, c32;": [(1, 2, 0, 1), (1, 2, M1, 2)],
    "set.lt.u32.s32 d32, a32, b32;": [(M1, 0, M1), (1, 0, 0)],
    "set.eq.f32.u32 d32, a32, b32;": [(4, 4, 0x3F800000), (4, 5, 0)],
    "mov.b64 d64, {a32, b32};": [(1, 2, 0x0000000200000001)],
    "mov.b64 {d32, q32}, a64;": [(0x0000000200000001, (1, 2))],
    "mov.b32 d32, {a16, b16};": [(0x1111, 0x2222, 0x22221111)],
    "mov.u32 d32, -1; add.u32 d32, d32, a32;": [(1, 0)],
}


@pytest.mark.parametrize("text", TABLE)
def test_results(text: str) -> None:
    check(text, TABLE[text])


COMPARE = {
    # (a, b) -> comparisons that hold
    "u32": [((1, 2), "ne lt le lo ls"), ((M1, 1), "ne gt ge hi hs"), ((5, 5), "eq le ge ls hs")],
    "s32": [((M1, 1), "ne lt le"), ((MIN, MAX), "ne lt le"), ((5, 5), "eq le ge")],
    "u64": [((M64, 1), "ne gt ge hi hs")],
    "s64": [((M64, 1), "ne lt le"), ((MIN64, 0), "ne lt le")],
    "u16": [((0xFFFF, 1), "ne gt ge hi hs")],
    "s16": [((0xFFFF, 1), "ne lt le")],
    "b32": [((MIN, 0), "ne"), ((7, 7), "eq")],
}


@pytest.mark.parametrize("kind", COMPARE)
def test_setp(kind: str) -> None:
    names = {"u": "eq ne lt le gt ge lo ls hi hs", "s": "eq ne lt le gt ge", "b": "eq ne"}[kind[0]].split()
    width = kind[1:]
    for name in names:
        rows = [(*pair, int(name in holds.split())) for pair, holds in COMPARE[kind]]
        check(f"setp.{name}.{kind} d1, a{width}, b{width};", rows)


def test_setp_with_two_results_and_a_third_operand() -> None:
    check("setp.lt.and.s32 d1|q1, a32, b32, c1;", [(1, 2, 1, (1, 0)), (1, 2, 0, (0, 0)), (2, 1, 1, (0, 1))])
    check("setp.lt.or.s32 d1, a32, b32, !c1;", [(2, 1, 0, 1), (2, 1, 1, 0)])
    check("setp.eq.xor.u32 d1, a32, b32, c1;", [(1, 1, 1, 0), (1, 2, 1, 1)])


def test_guarded_instructions_keep_the_old_value() -> None:
    check("mov.u32 d32, 7; setp.gt.s32 e1, a32, 0; @e1 add.u32 d32, a32, b32;".replace("e1", "%p7"), [(1, 2, 3), (0, 2, 7), (-1, 5, 7)])
    check("mov.u32 d32, 7; setp.gt.s32 %p7, a32, 0; @!%p7 mov.u32 d32, b32;", [(1, 2, 7), (0, 2, 2)])


@pytest.mark.parametrize(
    "text",
    [
        "frob.u32 d32, a32;",
        "add.cc.u32 d32, a32, a32;",
        "add.u32.weird d32, a32, a32;",
        "setp.lo.s32 d1, a32, a32;",
        "mul.u32 d32, a32, a32;",
    ],
)
def test_unknown_forms_are_refused_by_line(text: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+"):
        execute(text, [(1,)])
