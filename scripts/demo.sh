#!/usr/bin/env bash
# The main job of this project, shown on this machine: a true SGLang server on the CPU keeps its KV cache in a
# store on disk, finds it again after a cache flush and after a restart, and answers the same.
#
#   scripts/demo.sh [--keep] [--work DIR] [--prompt-tokens N]
#
#   --keep              keep the store when the demo has passed (default: remove it)
#   --work DIR          where store, config file, model and server logs go (default: .work/demo in the repository)
#   --prompt-tokens N   length of each of the two prompts, 1024 to 8000 (default: 1500)
#
# The first run installs SGLang for CPUs (scripts/env.sh says where, and takes UCM_ENVS_DIR, UCM_PYTHON and
# UCM_TORCH_INDEX); later runs use what is there. Every run starts with an empty store.
# The last line is the verdict. Exit status: 0 passed, 1 failed, 2 wrong usage, 130 interrupted.

set -u
demo_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || exit 1

for argument in "$@"; do
  case "$argument" in
    -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  esac
done

# shellcheck source=scripts/env.sh
. "$demo_root/scripts/env.sh"

if ! env_ensure sglang; then
  echo "demo: FAIL (no environment with SGLang; the reason is above)"
  exit 1
fi
VIRTUAL_ENV="$(env_dir sglang)"
export VIRTUAL_ENV
# SGLang compiles its prefix hash on first use and looks for ninja on PATH; ucm-sglang is there, too.
export PATH="$VIRTUAL_ENV/bin:$PATH"
export TQDM_DISABLE=1 # transformers' progress bars for files that take no time
exec "$VIRTUAL_ENV/bin/python" "$demo_root/scripts/demo.py" "$@"
