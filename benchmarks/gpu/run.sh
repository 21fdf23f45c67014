#!/usr/bin/env bash
# Measures hone's kernels and models on a machine with an NVIDIA GPU, PyTorch and no internet, in under six minutes.
#
#   1. where hone is built:  .venv/bin/python -m benchmarks.gpu.bundle OUT --python 312 --models resnet50=FILE:1,8,32
#      (--python: the other machine's; `python3 -c 'import sys; print(*sys.version_info[:2], sep="")'` there tells)
#   2. bring everything in OUT (each part is below 50 MB) into one folder on the machine with the GPU
#   3. there:  bash run.sh [SECONDS] [--stages rows models compile tuning]
#
# Prints what was checked and one table, and writes bundle/results.json. Exit code 1: a kernel was wrong, or did not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
seconds="${1:-330}"
python="${PYTHON:-python3}"

if compgen -G 'bundle.part*' >/dev/null; then
  # Parts of the row that times tuning may stay behind: then it is left out.
  compgen -G 'tuning.part*' >/dev/null && sums="$(cat SHA256SUMS)" || sums="$(grep -v '  tuning\.' SHA256SUMS)"
  sha256sum --quiet --check <<<"$sums" || { echo "run.sh: a part is missing or damaged; bring it again" >&2; exit 2; }
  if ! cmp --silent SHA256SUMS bundle/.sums; then  # none yet, or another one
    rm -rf bundle
    cat bundle.part* | tar -xz --no-same-owner
    cp SHA256SUMS bundle/.sums
  fi
  if compgen -G 'tuning.part*' >/dev/null && [ ! -d bundle/tuning ]; then
    cat tuning.part* | tar -xz --no-same-owner -C bundle
  fi
elif [ -e bundle.json ]; then
  :  # inside of the bundle already
else
  echo "run.sh: found no bundle.part* here; make them with 'python -m benchmarks.gpu.bundle OUT' and bring them all" >&2
  exit 2
fi
[ -d bundle ] && cd bundle

# tvm-ffi and ml-dtypes: what this Python has, else what came along.
export PYTHONPATH="$PWD/site:$PWD/python:${PYTHONPATH:-}"
if ! "$python" -c 'import tvm_ffi, ml_dtypes' 2>/dev/null; then
  version="$("$python" -c 'import sys; print(*sys.version_info[:2], sep="")')"
  if ! compgen -G 'wheels/*.whl' >/dev/null; then
    echo "run.sh: this Python has no tvm_ffi, and no wheels came along; make the bundle with --python $version" >&2
    exit 2
  fi
  "$python" -m pip install --quiet --no-index --find-links wheels --target site --upgrade --no-deps apache-tvm-ffi ml-dtypes
fi
exec timeout --kill-after=10 "$((seconds + 30))" "$python" -m benchmarks.gpu.device --seconds "$seconds" "${@:2}"
