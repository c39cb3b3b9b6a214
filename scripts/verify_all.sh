#!/bin/sh
# The whole matrix of "same text": every file of prompts in a folder, every policy, window and
# concurrency, greedy and sampled, and greedy beside transformers, on one private cluster.
#
#     scripts/verify_all.sh FOLDER [flags of `paceline verify`, such as --limit 2 or --json F]
#
# Takes about an hour on two cores. Exit code 1: a divergence.
set -eu
if [ "$#" -lt 1 ] || [ ! -d "$1" ]; then
    echo "usage: $0 FOLDER [flags of paceline verify]; FOLDER holds *.jsonl" >&2
    exit 2
fi
folder=$(cd "$1" && pwd)
shift
for file in "$folder"/*.jsonl; do
    [ -e "$file" ] || { echo "$0: no *.jsonl in $folder" >&2; exit 2; }
    set -- --input "$file" "$@"
done
cd "$(dirname "$0")/.."
paceline=paceline
[ ! -x .venv/bin/paceline ] || paceline=.venv/bin/paceline
exec "$paceline" verify \
    --limit 20 --max-tokens 64 --temperature 0,0.7,1 \
    --policy off,lockstep,chain --window 1,2,4,8 --concurrency 1,4 "$@"
