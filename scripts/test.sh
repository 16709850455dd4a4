#!/usr/bin/env bash
# Environments, lint, types, and every test suite of this project.
#
#   scripts/test.sh           everything
#   scripts/test.sh --core    only what needs no engine, without the three-minute soak
#
# Every stage runs, also after one failed; the last line is the verdict, and so is the exit status.
# UCM_ENVS_DIR, UCM_PYTHON and UCM_TORCH_INDEX: see scripts/env.sh.

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
. scripts/env.sh

with_engines=yes
case "${1:-}" in
  "") ;;
  --core) with_engines=no ;;
  *) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

failed=()
summary=()

# stage NAME COMMAND...: runs the command, notes how it ended and how long it took.
stage() {
  local name="$1" started=$SECONDS verdict=ok status=0
  shift
  printf '\n==> %s\n' "$name"
  "$@" || status=$?
  if [ "$status" != 0 ]; then
    verdict="FAILED (exit status $status)"
    failed+=("$name")
  fi
  summary+=("$(printf '%-12s %5d s  %s' "$name" $((SECONDS - started)) "$verdict")")
  printf '<== %s: %s, %d s\n' "$name" "$verdict" $((SECONDS - started))
  return "$status"
}

# skipped STAGE...: stages that cannot run because their environment is missing. That is a failure too.
skipped() {
  local name
  for name in "$@"; do
    failed+=("$name")
    summary+=("$(printf '%-12s %5d s  %s' "$name" 0 'NOT RUN (no environment)')")
  done
}

# in_env NAME COMMAND...: the command with that environment's programs first (torch looks for ninja on PATH).
in_env() {
  local dir
  dir="$(env_dir "$1")"
  PATH="$dir/bin:$PATH" VIRTUAL_ENV="$dir" "${@:2}"
}

core_marks="not sglang and not vllm and not soak and not compiled"
core_suite() { in_env core python -m pytest -n 2 --dist loadfile --durations=10 -m "$core_marks"; }
compiled_suite() { in_env core python -m pytest --durations=3 -m compiled; }
soak_suite() { in_env core python -m pytest --durations=3 -m soak; }
sglang_suite() { UCM_REQUIRE_ENGINES=sglang in_env sglang python -m pytest --durations=10 -m sglang; }

if stage env-core env_ensure core; then
  stage lint in_env core ruff check .
  stage format in_env core ruff format --check .
  stage types in_env core mypy
  stage core core_suite
  stage compiled compiled_suite
  [ "$with_engines" = yes ] && stage soak soak_suite
else
  skipped lint format types core compiled soak
fi

if [ "$with_engines" = yes ]; then
  if stage env-sglang env_ensure sglang; then
    stage sglang sglang_suite
  else
    skipped sglang
  fi
fi

printf '\n'
printf '%s\n' "${summary[@]}"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'test.sh: FAIL (stage %s) after %d s\n' "${failed[*]}" "$SECONDS"
  exit 1
fi
printf 'test.sh: PASS after %d s\n' "$SECONDS"
