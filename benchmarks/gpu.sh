#!/bin/bash
# Everything worth measuring on a machine with one GPU, in nine minutes; writes at most eight small files into DIR.
#
#     bash benchmarks/gpu.sh DIR [PART ...]
#
# DIR/gpu.md is the table, and DIR/session.log says what ran when; both are written as results come. Parts that run side by
# side: tests, warm (compile caches), memory, verify. Parts that run alone: versions, speed, timing, saves, profile, more. The
# time limit cuts the last ones first. Without a PART all of them run; calls with the same DIR fill one table. NANOGPT names a
# checkout of nanoGPT, whose train.py is timed as well. MINUTES (9) limits one call, and PYTHON (python3) names the interpreter.
# DEVICE=cpu SMALL=1 tries the script itself, with tiny sizes, fewer tests and three proofs (three minutes on two quiet cores).
# It installs nothing and needs no network; TMPDIR needs 8 GB.
set -eu
[ $# -ge 1 ] || { sed -n '4p' "$0"; exit 2; }
top=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$top/src:${PYTHONPATH:-} CUBLAS_WORKSPACE_CONFIG=:4096:8 HF_HUB_OFFLINE=1 WINDLASS_QUIET_END=1
export DEVICE=${DEVICE:-cuda} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
python=${PYTHON:-python3}
"$python" -c "import hypothesis, jinja2, numpy, psutil, pydantic, pytest_timeout, tokenizers, tomli_w, torch, typer, xdist
torch.ones(1, device='$DEVICE')" || { echo "$python lacks a package or a device: see tests/gpu/README.md" >&2; exit 2; }
exec "$python" "$top/benchmarks/gpu.py" "$@"
