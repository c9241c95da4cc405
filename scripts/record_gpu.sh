#!/usr/bin/env bash
# Run the GPU tests and the sanitizers on this machine's SM90 GPU and keep what they say.
#
#   scripts/record_gpu.sh OUT     -> OUT/environment.txt, tests.txt, memcheck.txt, racecheck.txt, initcheck.txt
#
# PYTHON chooses the interpreter, JOBS the number of test processes, SANITIZER_SECONDS how long each sanitizer may take, COMMIT what
# environment.txt says was run. Kernels come from build/packs and the disk cache, else they are compiled.
set -uo pipefail
out=${1:?usage: record_gpu.sh OUT}
python=${PYTHON:-python3}
jobs=${JOBS:-8}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    date -u +%Y-%m-%dT%H:%MZ
    echo "commit: ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" - <<'PY'
import platform
from importlib import metadata
import torch

print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "not installed: kernels come from packs")
PY
    compute-sanitizer --version | tail -1
} > "$out/environment.txt" 2>&1

status=0
plain="-p no:cacheprovider -p no:benchmark"  # whatever plugins the machine has
# shellcheck disable=SC2086  # options
"$python" -m pytest tests/gpu -n "$jobs" -q -rs $plain --tb=short --durations=10 > "$out/tests.txt" 2>&1 || status=1
tail -n 3 "$out/tests.txt"

# A small set under each tool: every kernel, both families, with padding, speculative rows and strided pools. Only this package's kernels
# are watched, and PyTorch's caching allocator is off, so that an access past a tensor is an access past an allocation.
chosen='(test_every_token_count and (5- or -5 or 129- or -129)) or test_all_policies or (test_padding and 7-) or test_sanitized or test_rows_against'
for tool in memcheck racecheck "initcheck --check-api-memory-access no"; do
    name=${tool%% *}
    # shellcheck disable=SC2086  # a tool with its option: tests copy whole buffers, gaps included, which is no fault of a kernel
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${SANITIZER_SECONDS:-150}" \
        compute-sanitizer --tool $tool --kernel-name kernel_substring=cutlass --error-exitcode 9 --print-limit 20 \
        "$python" -m pytest tests/gpu -q $plain -p no:xdist --tb=line -k "$chosen" > "$out/$name.txt" 2>&1 || status=1
    echo "$name: $(tail -n 3 "$out/$name.txt" | tr '\n' ' ')"
done
exit $status
