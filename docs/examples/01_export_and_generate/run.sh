#!/bin/sh
# Usage: run.sh CHECKPOINT BUNDLE
set -e
spaceport export "$1" "$2"
spaceport generate "$2" --chat "Explain the parameters of move( src, dst, copy = None )"
