#!/bin/sh
# Usage: run.sh BUNDLE
set -e
spaceport audit "$1" "$(dirname "$0")/prompts.txt" --max-tokens 24 --threads 1
