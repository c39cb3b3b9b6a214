#!/usr/bin/env bash
# All checks of one GPU, one after the other: bits, errors and times. docs/gpu.md says what is in it.
#
#   scripts/gpu_check.sh [--wheels FOLDER] [options of scripts/gpu_check, see --help]
#
# FOLDER has wheels of packages that the Python here lacks (the first line of output names them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
if [ "${1:-}" = --wheels ]; then
  site=$(mktemp -d)
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  shift 2
fi
exec "$python" -m scripts.gpu_check "$@"
