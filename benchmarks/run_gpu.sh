#!/usr/bin/env bash
# For a GPU that is at hand for a few minutes: correctness first, then every benchmark of the device.
#
#   benchmarks/run_gpu.sh OUT [PART ...]     writes OUT/*.json after each case and prints the tables last
#
# Without parts all of them, within 13 minutes. A part is the first word after `part` below.
#
# Then, to tune a shape: python -m benchmarks.tune_paged_attention_gpu --shape 'K8 G4 H128' --out OUT/tuned.json
#
# PYTHON chooses the interpreter (python3), COMMIT names the code of a copy without git. Needs jax with CUDA and what
# the engine imports (flax, sentencepiece, tokenizers, safetensors, jaxtyping, rich); no test runner, no server.
set -uo pipefail
out=$(realpath -m "${1:?"usage: benchmarks/run_gpu.sh OUT [PART ...]"}")
wanted=" ${*:2} "
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export COLUMNS=150
python=${PYTHON:-python3}
mkdir -p "$out"
failed=()

part() { # NAME SECONDS MODULE ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return
  timeout "$seconds" "$python" -m "$@" >"$out/$name.log" 2>&1 || failed+=("$name")
}

part correctness 180 benchmarks.correctness
part kernels 60 benchmarks.kernels --out "$out/kernels.json"
part steps 120 benchmarks.steps --layers 8 --out "$out/steps.json"
part quantized 150 benchmarks.steps --layers 8 --kind decode --rows 1 --rows 8 --rows 64 --kv auto --kv fp8 \
  --weights auto --weights int8 --weights fp8 --weights int4-g128 --out "$out/quantized.json"
part products 30 benchmarks.quantized_matmul --rows 1 64 2048 --out "$out/products.json"
part together 40 benchmarks.steps --layers 8 --rows 1 --rows 64 --kind decode --decode-steps 8 --out "$out/together.json"
part speculation 90 benchmarks.speculation --shape llama3.1-8b --layers 8 --agreement 0.8 --streams 1 --streams 16 \
  --streams 64 --runs 3 --tokens 64 --out "$out/speculation.json"
part host_path 15 benchmarks.host_path --out "$out/host_path.json"
part idle 60 benchmarks.host_path --model llama3.1-8b --layers 8 --steps 100 --out "$out/idle.json"

for log in "$out"/*.log; do
  echo "== $(basename "$log" .log)"
  grep WRONG "$log"
  tail -n 20 "$log"
done
if ((${#failed[@]})); then
  echo "FAILED or out of time: ${failed[*]}"
  exit 1
fi
