#!/usr/bin/env bash
# The path of the tutorial, timed on a clean clone: install, doctor, demo, advise on a file, the report, attention swapped in a script.
#   benchmarks/newcomer.sh [--here]      clones HEAD (with --here: copies the working tree) into a new folder and follows the tutorial
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d "${TMPDIR:-/tmp}/newcomer.XXXXXX")
begin=$SECONDS
step() { printf '%4d s  %s\n' "$((SECONDS - begin))" "$*"; }

if [ "${1:-}" = --here ]; then
  mkdir "$folder/flexcp"
  (cd "$root" && git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t "$folder/flexcp")
else
  git clone --quiet "$root" "$folder/flexcp"
fi
cd "$folder/flexcp"
step "cloned"
python3 -m venv .venv && . .venv/bin/activate
pip install --quiet --disable-pip-version-check -c constraints.txt -e .
step "installed"
flexcp doctor > doctor.txt
step "doctor: $(tail -1 doctor.txt)"
flexcp demo > demo.txt
step "demo: $(tail -1 demo.txt)"
python - <<'PY'
import random
random.seed(0)
lengths = [int(random.lognormvariate(7, 1.4)) + 1 for _ in range(2000)]
open("lengths.txt", "w").write("\n".join(map(str, lengths)))
PY
flexcp advise lengths.txt --model llama3-8b --cluster h100:4x8 --max-tokens-per-rank 32768 --html advice.html > advice.txt
step "advise: $(grep -A1 'What to do' advice.txt | tail -1)"
flexcp plan --lengths web:131072:0 --cluster h100:2x4 --kv-heads 8 --strategy blocks --html plan.html > plan.txt
step "report: $(wc -c < plan.html) bytes"
python - <<'PY'
import pathlib, re
text = pathlib.Path("docs/tutorial.md").read_text()
pathlib.Path("swap.py").write_text(re.search(r"<!-- run: torchrun 2 -->\n```python\n(.*?)```", text, re.S)[1])
PY
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 swap.py > swap.txt 2> swap.err
step "swap.py: $(tail -1 swap.txt)"
step "done, in $folder"
