#!/usr/bin/env bash
# Builds the compiled kernel with the address and undefined-behaviour sanitizers of gcc, in a folder of its own, and gives
# it BATCHES mutated batches (10 million), shared by as many processes as there are cores. SEED repeats a run.
set -eu
cd "$(dirname "$0")/.."
batches=${BATCHES:-10000000}
seed=${SEED:-$RANDOM$RANDOM}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

PATH="$PWD/.tools/bin:$PATH" uv run --quiet --no-project --python .venv/bin/python --with "cython>=3.1" --with "hatchling>=1.27" \
    python - "$folder/kernel.abi3.so" <<'END'
import sys
from pathlib import Path

sys.path.insert(0, ".")
from hatch_build import SOURCE, build_kernel

sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g")
why_not = build_kernel(SOURCE.absolute(), Path(sys.argv[1]), sanitizers)
sys.exit(why_not)
END

# Python itself is not built with the sanitizers, so their library is loaded first; what Python never frees is no leak.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc
jobs=${JOBS:-$(nproc)}
pids=()
for ((job = 0; job < jobs; job++)); do
    .venv/bin/python tests/records/kernel_fuzzing.py "$folder/kernel.abi3.so" $((batches / jobs)) "$seed-$job" &
    pids+=($!)
done
verdict=0
for pid in "${pids[@]}"; do wait "$pid" || verdict=1; done
[ "$verdict" = 0 ] || echo "A finding with seed $seed: SEED=$seed scripts/fuzz-kernel.sh" >&2
exit "$verdict"
