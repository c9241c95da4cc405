"""Running small Python programs in processes of their own, for what depends on process state: imports, caches, kills."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(**variables: str | None) -> dict[str, str]:
    """This process's environment with changes; None removes a variable."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return {k: v for k, v in merged.items() if v is not None}


def _obey_permissions() -> None:
    """Root may write anywhere; without this capability it may not, once it has started another program."""
    pr_capbset_drop, cap_dac_override = 24, 1
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0):
        raise OSError("cannot give up CAP_DAC_OVERRIDE")


def start(
    program: str, *arguments: object, bound_by_permissions: bool = False, cwd: Path = ROOT, **variables: str | None
) -> subprocess.Popen[str]:
    """Start a program; its last printed line is to be JSON. `bound_by_permissions`: file modes bind it even if it runs as root."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        preexec_fn=_obey_permissions if bound_by_permissions else None,
        env=environment(**variables),
    )


def result(process: subprocess.Popen[str], timeout: float = 300) -> Any:
    """The JSON a started program printed last; fails with its output if it did not exit with 0."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
    return json.loads(out.strip().splitlines()[-1])


def run(program: str, *arguments: object, **options: Any) -> Any:
    """Run a program to its end and return the JSON it printed last."""
    return result(start(program, *arguments, **options))
