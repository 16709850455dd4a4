#!/usr/bin/env bash
# Makes the Python environments of this project from the pinned files in requirements/.
#
#   scripts/env.sh core            environment with the packages, their tests, ruff and mypy (no engine)
#   scripts/env.sh sglang          environment with SGLang on a CPU
#   scripts/env.sh vllm            environment with vLLM on a CPU
#   scripts/env.sh bench           environment with the packages and matplotlib, for scripts/bench_store.py
#   scripts/env.sh ucm | nixl      environment with a peer's wheel alone, which scripts/bench_store.py measures
#   . scripts/env.sh               the functions below, for other scripts
#
# UCM_ENVS_DIR     where the environments live           (default: .envs in the repository)
# UCM_PYTHON       the Python to make them with          (default: python3.11, else python3 if it is >= 3.11)
# UCM_PYTHON312    the Python for `ucm`, whose wheel is for 3.12 (default: python3.12, else pyenv's newest 3.12)
# UCM_TORCH_INDEX  package index with torch's CPU builds (default: https://download.pytorch.org/whl/cpu)
#
# Calling it again costs nothing: a stamp in each environment holds the hash of what it was made from.

UCM_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
UCM_ENVS_DIR="${UCM_ENVS_DIR:-$UCM_ROOT/.envs}"
UCM_TORCH_INDEX="${UCM_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

env_say() { printf '[env %s] %s\n' "$1" "${*:2}"; }

# env_dir NAME: the environment's folder.
env_dir() { printf '%s/%s\n' "$UCM_ENVS_DIR" "$1"; }

# env_requirements NAME: the pinned file it is made from.
env_requirements() {
  case "$1" in
    core | bench) echo "$UCM_ROOT/requirements/$1.txt" ;;
    sglang | vllm) echo "$UCM_ROOT/requirements/$1-cpu.txt" ;;
    ucm | nixl) echo "$UCM_ROOT/requirements/peer-$1.txt" ;;
    *) echo "env.sh: unknown environment '$1' (known: core, sglang, vllm, bench, ucm, nixl)" >&2; return 2 ;;
  esac
}

# env_has_engine NAME, env_is_peer NAME: has it torch and an engine? Is it a peer's wheel without this project?
env_has_engine() { [ "$1" = sglang ] || [ "$1" = vllm ]; }
env_is_peer() { [ "$1" = ucm ] || [ "$1" = nixl ]; }

# env_find_python: prints a Python >= 3.11. The pins are resolved for 3.11, so that one comes first.
env_find_python() {
  local candidate
  for candidate in ${UCM_PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "env.sh: no Python >= 3.11 among: ${UCM_PYTHON:-python3.11 python3} (install it or set UCM_PYTHON)" >&2
  return 1
}

# env_find_python312: prints a Python 3.12.
env_find_python312() {
  local candidate
  for candidate in ${UCM_PYTHON312:-python3.12 "$(printf '%s\n' "$HOME"/.pyenv/versions/3.12.*/bin/python | sort -V | tail -1)"}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "env.sh: no Python 3.12, which UCM's wheel needs (install it or set UCM_PYTHON312)" >&2
  return 1
}

# env_stamp NAME: hash of all that decides what the environment holds, and where its editable install points.
env_stamp() {
  local requirements
  requirements="$(env_requirements "$1")" || return
  { cat "$requirements" "$UCM_ROOT"/pyproject.toml "$UCM_ROOT"/posix_store/*.[ch] && echo "$UCM_ROOT"; } |
    sha256sum | cut -d' ' -f1
}

# env_pip PYTHON ARGS...: pip with its lines shown; only its notes on absent local index folders are left out.
env_pip() {
  local python="$1"
  shift
  (set -o pipefail; "$python" -m pip "$@" --progress-bar off --disable-pip-version-check 2>&1 |
    sed -u '/WARNING: Location/d')
}

# env_create NAME DIR: an empty virtual environment with pip, also where Python came without ensurepip.
env_create() {
  local name="$1" dir="$2" python
  if [ "$name" = ucm ]; then
    python="$(env_find_python312)" || return
  else
    python="$(env_find_python)" || return
  fi
  env_say "$name" "creating $dir with $("$python" --version)"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$dir"
  else
    "$python" -m venv --without-pip "$dir" && env_pip "$python" --python "$dir/bin/python" install pip
  fi
}

# env_torch_args REQUIREMENTS: prints the pip arguments that find torch's CPU build: none when pip is configured
# with a folder that has it, else PyTorch's own index. env_check_torch says so when another build came.
env_torch_args() {
  local python
  python="$(env_find_python)" || return
  if "$python" -m pip install --dry-run --no-deps --no-index --target /nonexistent \
    "$(grep '^torch==' "$1")" >/dev/null 2>&1
  then
    return 0
  fi
  printf '%s\n' --extra-index-url "$UCM_TORCH_INDEX"
}

env_check_torch() {
  local dir="$1"
  "$dir/bin/python" - <<'PY'
import sys
import torch

if torch.version.cuda is not None or torch.version.hip is not None:
    sys.exit(
        f"env.sh: torch {torch.__version__} is a GPU build without its libraries; the CPU build is needed: "
        "set UCM_TORCH_INDEX to an index that has it and remove this environment"
    )
PY
}

# env_headers NAME: SGLang and torch compile small C++ extensions on first use; they need g++ and OpenSSL's headers.
env_headers() {
  local name="$1" probe='#include <openssl/sha.h>'
  if g++ -E -x c++ - <<<"$probe" >/dev/null 2>&1; then
    return 0
  fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    env_say "$name" "g++ or openssl/sha.h is missing: installing g++ and libssl-dev with apt-get"
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q g++ libssl-dev || return
    g++ -E -x c++ - <<<"$probe" >/dev/null && return 0
  fi
  echo "env.sh: SGLang compiles its prefix hash on first use and needs g++ and OpenSSL's headers (openssl/sha.h)." >&2
  echo "env.sh: install them, on Debian or Ubuntu: apt-get install g++ libssl-dev" >&2
  return 1
}

# env_install NAME DIR: the pins, then this repository as an editable install.
env_install() {
  local name="$1" dir="$2" requirements pip_args=()
  requirements="$(env_requirements "$name")" || return
  if env_has_engine "$name"; then
    mapfile -t pip_args < <(env_torch_args "$requirements")
  fi
  env_say "$name" "installing the $(grep -c '==' "$requirements") packages of ${requirements#"$UCM_ROOT"/}"
  env_pip "$dir/bin/python" install --no-deps "${pip_args[@]}" -r "$requirements" || return
  if env_is_peer "$name"; then
    return 0
  fi
  env_say "$name" "installing ucm-sglang from $UCM_ROOT, editable"
  env_pip "$dir/bin/python" install --no-deps --no-build-isolation -e "$UCM_ROOT" || return
  if env_has_engine "$name"; then
    env_check_torch "$dir"
  fi
}

# env_ensure NAME: makes or updates the environment if its stamp is not that of the pinned files.
env_ensure() {
  local name="$1" dir want started=$SECONDS
  dir="$(env_dir "$name")"
  want="$(env_stamp "$name")" || return
  if [ "$name" = sglang ]; then
    env_headers "$name" || return
  fi
  mkdir -p "$UCM_ENVS_DIR"
  (
    flock 9 # two scripts may ask for the same environment at once
    if [ "$(cat "$dir/.ucm-stamp" 2>/dev/null)" = "$want" ]; then
      env_say "$name" "up to date: $dir"
      exit 0
    fi
    [ -x "$dir/bin/pip" ] || env_create "$name" "$dir" || exit
    rm -f "$dir/.ucm-stamp"
    env_install "$name" "$dir" || exit
    echo "$want" >"$dir/.ucm-stamp"
    env_say "$name" "ready after $((SECONDS - started)) s: $dir"
  ) 9>"$UCM_ENVS_DIR/.$name.lock"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  if [ $# -eq 0 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
  fi
  for env_name in "$@"; do
    env_ensure "$env_name" || exit
  done
fi
