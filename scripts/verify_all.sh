#!/bin/sh
# The whole matrix of "same text": the first 20 prompts of every file in a folder, 64 tokens, every
# policy, window and concurrency, greedy (and then beside transformers) and sampled, on one cluster.
#
#     scripts/verify_all.sh FOLDER RESULTS [flags of `paceline verify`, such as --limit 2]
#
# A part is one file at one temperature; its figures are RESULTS/FILE.TEMPERATURE.json. A part whose
# figures are there is not run again, so that a run may be stopped and continued; PARTS=N ends it
# after N parts. Each run ends with a total over all parts so far. Within a part transformers
# decodes each prompt once, and plain decoding, with which all is compared, runs once.
#
# Uses the cluster of `paceline up` with the default configuration, else starts one and ends it.
# Exit code 1: a divergence or a row that failed; 4: parts are still missing.
set -eu
if [ "$#" -lt 2 ] || [ ! -d "$1" ]; then
    echo "usage: $0 FOLDER RESULTS [flags of paceline verify]; FOLDER holds *.jsonl" >&2
    exit 2
fi
ls "$1"/*.jsonl >/dev/null 2>&1 || { echo "$0: no *.jsonl in $1" >&2; exit 2; }
folder=$(cd "$1" && pwd)
mkdir -p "$2"
results=$(cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ ! -x .venv/bin/python ] || python=.venv/bin/python
paceline="$python -m deploy.cli"

if ! $paceline status >/dev/null 2>&1; then
    trap '$paceline down >/dev/null' EXIT
    trap 'exit 130' INT TERM
    PACELINE_SERVER__GRPC_PORT=0 $paceline up >/dev/null
fi
left=${PARTS:--1}
missing=0
for file in "$folder"/*.jsonl; do
    for temperature in 0 1; do
        part=$results/$(basename "$file" .jsonl).$temperature.json
        [ ! -e "$part" ] || continue
        if [ "$left" = 0 ]; then
            missing=$((missing + 1))
            continue
        fi
        left=$((left - 1))
        code=0
        $paceline verify --input "$file" --json "$part" --temperature "$temperature" \
            --limit 20 --max-tokens 64 --policy off,lockstep,chain --window 1,2,4,8 \
            --concurrency 1,4 "$@" || code=$?
        [ "$code" -le 1 ] || exit "$code"
    done
done
code=0
"$python" scripts/verify_total.py "$results" || code=$?
if [ "$missing" != 0 ]; then
    echo "$missing parts are still missing: run this again"
    [ "$code" != 0 ] || code=4
fi
exit "$code"
