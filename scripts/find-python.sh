#!/usr/bin/env bash
# Prints the path of an installed Python of this version (3.13): from the PATH, or one that pyenv keeps.
set -u
version=$1
is_right() { "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; }

for candidate in "python$version" python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python; do
    # A shim of pyenv is on the PATH even where its version is not selected, so each candidate is asked.
    if command -v "$candidate" >/dev/null && is_right "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "Python $version is not installed." >&2
exit 1
