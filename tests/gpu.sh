#!/usr/bin/env bash
# What a GPU is tried with, in under ten minutes. DEVICE=cpu tries the script itself, PYTHON names
# another interpreter than that of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
export DEVICE="${DEVICE:-cuda}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # without it cuBLAS may give other bits every time
exec "${PYTHON:-.venv/bin/python}" tests/gpu.py
