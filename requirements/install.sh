#!/usr/bin/env bash
# Usage: install.sh PYTHON VENV LOCK...   makes the virtual environment and installs the locks and this package into it.
set -euo pipefail
python=$1 venv=$2
shift 2
locks=("${@/#/--requirement=}")
stage() { printf '[setup] %s\n' "$*"; }
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -x "$venv/bin/python" ]; then
  stage "creating $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip -qq)

stage "installing $(cat "${@}" | grep -c '==') pinned packages, about 3 minutes"
# Without dependency resolution: the locks are complete, and leave out on purpose what some packages ask for (see cpu.txt).
# Of pip's many lines every 25th package is shown.
"$venv/bin/python" -m pip install --progress-bar off --no-deps "${locks[@]}" \
  | awk '/^Collecting/ && ++n % 25 == 0 { print "[setup] " n " packages downloaded"; fflush() } /^Installing collected/ { print "[setup] unpacking them"; fflush() }'

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  stage "this torch is built for CUDA and needs its libraries to be imported: installing them"
  "${pip[@]}" install "${locks[@]/#--requirement=/--constraint=}" "$(grep '^torch==' "$1")"
fi

stage "installing conveyor itself"
"${pip[@]}" install --no-deps --no-build-isolation --editable .
stage "done: $venv"
