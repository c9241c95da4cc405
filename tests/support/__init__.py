"""Case generators, float64 oracles and comparisons, shared by the CPU, emulator and GPU suites.

    case = make_compress_case(mix(300, 5, ratio=4, seed=1), ratio=4, kv_format="fp8_ds_mla", padding=3)
    before = case.clone()
    some_compress_store(*case.args(), **case.kwargs())
    check_compress(before, case)

Oracles are written from the definition, in numpy, with no code of the library; only the words of its contract (`SavePolicy`, `IdSource`,
`PoolGeometry`, the index dataclasses) are shared.
"""

from tests.support.attention import DecodeCase, PlainStep, check_decode, make_decode_case, plain_step
from tests.support.compress import CompressCase, make_compress_case
from tests.support.compress_check import CompressReport, check_compress
from tests.support.index_case import IndexCase, check_indices, make_index_case
from tests.support.insert import InsertCase, check_insert, make_insert_case
from tests.support.steps import Request, mix

__all__ = [
    "CompressCase",
    "CompressReport",
    "DecodeCase",
    "IndexCase",
    "InsertCase",
    "PlainStep",
    "Request",
    "check_compress",
    "check_decode",
    "check_indices",
    "check_insert",
    "make_compress_case",
    "make_decode_case",
    "make_index_case",
    "make_insert_case",
    "mix",
    "plain_step",
]
