#!/bin/sh
# Usage: run.sh CHECKPOINT TUNED [OPTIONS OF spaceport tune]
set -e
checkpoint="$1" tuned="$2"
shift 2
data="$(dirname "$0")/train.jsonl"
spaceport tune "$checkpoint" "$tuned" "$data" --objective both --batch-size 4 --learning-rate 1e-3 "$@"
spaceport acceptance "$tuned" "$data" --limit 2
