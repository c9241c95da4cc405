"""An emulated device behind the host code of a compiled CuTe DSL object.

`load` links the object with a small C library in place of the CUDA runtime. The function it returns takes CPU torch tensors; the
object's own host code checks them (they are relabelled as tensors on `cuda:0`, at their own addresses), computes grid, block,
cluster, shared memory and parameter structs, and launches; the launch runs in the emulator. So nothing of the launch is described
twice.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptx_emulator.faults import EmulatorError, KernelFault, LaunchError, PtxSyntaxError
from ptx_emulator.launch import Result, load_programs, run_ptx
from ptx_emulator.memory import Memory
from ptx_emulator.program import SHARED_START

_SOURCE = Path(__file__).with_name("device_runtime.c")
# DLPack (type code, bits): 0 int, 1 uint, 2 float, 4 bfloat16, 6 bool, 10 float8_e4m3fn
_DTYPES = {
    **{f"torch.int{b}": (0, b) for b in (8, 16, 32, 64)},
    "torch.uint8": (1, 8),
    "torch.bool": (6, 8),
    "torch.float16": (2, 16),
    "torch.float32": (2, 32),
    "torch.float64": (2, 64),
    "torch.bfloat16": (4, 16),
    "torch.float8_e4m3fn": (10, 8),
}
_CLUSTER, _PLACING, _PDL = 4, 5, 6  # cudaLaunchAttributeID


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p))


@dataclass
class Settings:
    """How launches are run; shared by all kernels that are given the same object.

    prepare        called with (kernel's name for the caller, Memory, arguments by name) before each launch: declare outputs there
    approximation, check_races, statistics  see `run_ptx`
    on_result      called with the Result of each launch, whose `kernel` is the caller's name for it
    independent    called with the arguments by name: whether the launch is independent of the kernels in front of it (`run_ptx`)
    """

    prepare: Callable[[str, Memory, dict[str, Any]], None] | None = None
    on_result: Callable[[Result], None] | None = None
    independent: Callable[[dict[str, Any]], bool] | None = None
    approximation: str = "nearest"
    check_races: bool = True
    statistics: bool = False


@dataclass
class LaunchRecord:
    """The launch the host code asked for. placing: of clusters, a cudaClusterSchedulingPolicy."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared: int
    pdl: bool
    placing: int


@dataclass
class EmulatedKernel:
    """A compiled function on the emulated device; call it with CPU tensors and numbers in the order of `argument_names`.

    `programs` are the kernels that its launches find, by name: those of `ptx`, unless somebody puts others in their place.
    """

    name: str
    function: Any
    library: ctypes.CDLL
    ptx: str
    argument_names: Sequence[str]
    settings: Settings
    shared_limit: int
    ptx_file: Path | None = None
    launches: list[LaunchRecord] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    _arguments: dict[str, Any] = field(default_factory=dict)
    _error: BaseException | None = None

    def __post_init__(self) -> None:
        try:
            self.programs = load_programs(self.ptx)
        except PtxSyntaxError as error:
            raise error.of_file(self.ptx_file) from None
        self._callback = _CALLBACK(self._launch)

    def __call__(self, *arguments: Any) -> Any:
        names = list(self.argument_names)
        if len(arguments) != len(names):
            names = [f"argument {i}" for i in range(len(arguments))]
        self._arguments = dict(zip(names, arguments, strict=True))
        self._error = None
        self.launches, self.results = [], []
        static = max(p.build.static_shared for p in self.programs.values()) - SHARED_START
        self.library.ptx_emulator_connect(self._callback, self.shared_limit, static)  # kernels of one object share its library
        try:
            return self.function(*(self._relabel(a) for a in arguments))
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._arguments = {}

    def _relabel(self, argument: Any) -> Any:
        if not hasattr(argument, "data_ptr"):
            return argument
        import tvm_ffi

        if str(argument.dtype) not in _DTYPES:
            raise LaunchError(f"tensor of {argument.dtype}: no DLPack type known here")
        code, bits = _DTYPES[str(argument.dtype)]
        n = argument.dim()
        shape, strides = (ctypes.c_int64 * n)(*argument.shape), (ctypes.c_int64 * n)(*argument.stride())
        managed = self.library.ptx_emulator_tensor(ctypes.c_void_p(argument.data_ptr()), n, shape, strides, code, bits)
        return tvm_ffi.from_dlpack(_Capsule(managed))

    def _launch(self, kernel: bytes, config: Any, arguments: Any) -> int:
        """The launch callback; whatever goes wrong is kept for `__call__`, as no exception can cross the host code."""
        try:
            self._run(kernel.decode(), config[0], arguments)
        except BaseException as error:
            self._error = error.of_file(self.ptx_file) if isinstance(error, KernelFault) else error
            return 719  # cudaErrorLaunchFailure
        return 0

    def _run(self, kernel: str, config: _Config, arguments: Any) -> None:
        program = self.programs.get(kernel)
        if program is None:
            raise LaunchError(f"the object launches {kernel}, its PTX holds {', '.join(self.programs)}")
        cluster, placing, pdl = None, 0, False
        table = ctypes.cast(config.attributes, ctypes.POINTER(_Attribute))
        for i in range(config.attribute_count):
            if table[i].id == _CLUSTER:
                x, y, z = table[i].value[:3]
                cluster = (x, y, z)
            elif table[i].id == _PLACING:
                placing = table[i].value[0]
            elif table[i].id == _PDL:
                pdl = bool(table[i].value[0])
        buffer = bytearray(program.kernel.parameter_bytes)
        for i, p in enumerate(program.kernel.parameters):
            buffer[p.offset : p.offset + p.size] = ctypes.string_at(arguments[i], p.size)
        memory = Memory()
        for name, value in self._arguments.items():
            if hasattr(value, "data_ptr"):
                memory.add_tensor(name, value, at_own_address=True)
        settings = self.settings
        if settings.prepare:
            settings.prepare(self.name, memory, self._arguments)
        record = LaunchRecord(tuple(config.grid), tuple(config.block), cluster or (1, 1, 1), config.dynamic_shared, pdl, placing)
        self.launches.append(record)
        result = run_ptx(
            program,
            record.grid,
            record.block,
            bytes(buffer),
            memory,
            cluster=cluster,
            dynamic_shared=record.dynamic_shared,
            pdl=pdl,
            independent=settings.independent is not None and settings.independent(self._arguments),
            approximation=settings.approximation,
            check_races=settings.check_races,
            statistics=settings.statistics,
            shared_limit=self.shared_limit,
        )
        result.kernel = self.name
        self.results.append(result)
        if settings.on_result:
            settings.on_result(result)


class _Capsule:
    """What `from_dlpack` asks for."""

    def __init__(self, managed: int) -> None:
        self.managed = managed

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(self.managed, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def load(
    object_file: Path,
    symbol: str,
    ptx: str,
    *,
    argument_names: Sequence[str] = (),
    name: str = "",
    ptx_file: Path | None = None,
    shared_limit: int = 232_448,
    settings: Settings | None = None,
    build_folder: Path | None = None,
) -> EmulatedKernel:
    """The function `symbol` of an object, launching into the emulator.

    ptx           text of the PTX the object was built from
    ptx_file      where that text is, for messages
    shared_limit  bytes of shared memory a block may have on the device emulated
    build_folder  where linked libraries are kept and found again; a temporary folder without it

    Needs a C compiler (`$CC`, `cc`, `gcc` or `clang`) and TVM-FFI.
    """
    import tvm_ffi

    library = link(object_file, build_folder)
    ctypes.CDLL(str(tvm_ffi.libinfo.find_libtvm_ffi()), mode=ctypes.RTLD_GLOBAL)
    handle = ctypes.CDLL(str(library))
    handle.ptx_emulator_connect.argtypes = (_CALLBACK, ctypes.c_int, ctypes.c_int)
    handle.ptx_emulator_connect.restype = None
    handle.ptx_emulator_tensor.restype = ctypes.c_void_p
    function = tvm_ffi.load_module(str(library))[symbol]
    return EmulatedKernel(name or symbol, function, handle, ptx, argument_names, settings or Settings(), shared_limit, ptx_file)


def link(object_file: Path, folder: Path | None = None) -> Path:
    """Link an object with the stand-in runtime; the result is kept in `folder` under the hash of both."""
    digest = hashlib.sha256(Path(object_file).read_bytes() + _SOURCE.read_bytes()).hexdigest()[:32]
    folder = Path(folder) if folder else Path(tempfile.gettempdir()) / f"ptx_emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / f"{digest}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise EmulatorError("no C compiler found (cc, gcc, clang, or $CC): the emulated device is linked with one")
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as staged:
        pass
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", "-o", staged.name, str(_SOURCE), str(object_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        os.unlink(staged.name)
        raise EmulatorError(f"linking {object_file} failed:\n{done.stderr}")
    os.replace(staged.name, library)
    return library
