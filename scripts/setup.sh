#!/usr/bin/env bash
# Makes .venv from uv.lock with the Python that is there. Where uv is not installed, it is put into .tools/ first.
# PYTHON chooses the Python, and UV_PROJECT_ENVIRONMENT another folder than .venv.
set -eu
cd "$(dirname "$0")/.."
environment=${UV_PROJECT_ENVIRONMENT:-.venv}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=""
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
        python=$(command -v "$candidate")
        break
    fi
done
if [ -z "$python" ]; then
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is not Python 3.11 or newer. Name one that is, or leave PYTHON out." >&2
        exit 1
    fi
    echo "Python 3.11 or newer is missing. Install it: apt-get install python3 python3-venv (or: brew install python)" >&2
    exit 1
fi

if ! command -v uv >/dev/null; then
    if [ ! -x .tools/bin/uv ]; then
        if ! "$python" -m venv .tools; then
            rm -rf .tools
            echo "Python's venv module is missing. Install it: apt-get install python3-venv" >&2
            exit 1
        fi
        .tools/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.8"
    fi
    PATH="$PWD/.tools/bin:$PATH"
fi
# Compiled once here: every broker and worker that a test or a demo starts would otherwise compile what it imports.
uv sync --quiet --locked --python "$python" --no-python-downloads --compile-bytecode
"$environment/bin/python" -m compileall -q src/semel
# uv builds the compiled codec only if a source of it has changed. Where the file was removed, it is built again; where
# it cannot be built, this says why.
if ! "$environment/bin/python" -c "import semel.records.kernel" 2>/dev/null; then
    uv sync --quiet --locked --python "$python" --no-python-downloads --reinstall-package semel
    "$environment/bin/python" -c "import semel.records.compiled"
fi
