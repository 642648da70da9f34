#!/usr/bin/env bash
# For a GPU that is at hand for a few minutes: correctness first, then every benchmark of the device.
#
#   benchmarks/run_gpu.sh OUT [PART ...]     writes OUT/*.json after each case and prints the logs last
#
# A part is the first word after `part` below; without parts all of them. Each has a limit of time, 17 minutes together,
# and the next one goes on where it is reached. Parts that prove answers run side by side, as they mostly compile; parts
# that measure run alone.
#
# Then, to tune a shape: python -m benchmarks.tune_paged_attention_gpu --shape 'K8 G4 H128' --out OUT/tuned.json
#
# PYTHON chooses the interpreter (python3), COMMIT names the code of a copy without git. Needs jax with CUDA and what
# jaxserve imports; for the part `tests` also pytest with its plugins xdist and timeout, and hypothesis.
set -uo pipefail
out=$(realpath -m "${1:?"usage: benchmarks/run_gpu.sh OUT [PART ...]"}")
wanted=" ${*:2} "
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export COLUMNS=150 PYTHONUNBUFFERED=1
export JAX_PLATFORMS=cuda,cpu
# Processes side by side share the GPU's memory, and compiled programs.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/compiled}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
python=${PYTHON:-python3}
mkdir -p "$out"

part() { # NAME SECONDS MODULE ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
  echo "-- $name"
  local began=$SECONDS
  timeout -k 5 "$seconds" "$python" -m "$@" >"$out/$name.log" 2>&1 || echo "$name" >>"$out/failed"
  echo "-- $name: $((SECONDS - began)) s"
}

rm -f "$out/failed"
part tests 150 pytest -q -n 6 -W default -m "kernels and not random_kernels" --tb short \
  tests/pallas_kernels/test_paged_attention_gpu.py tests/pallas_kernels/test_grouped_matmul_gpu.py \
  tests/pallas_kernels/test_quantized_matmul_gpu.py tests/jaxserve/engine/test_engine_gpu_kernel.py \
  tests/pallas_kernels/test_gated_delta_kernels.py tests/jaxserve/engine/test_state_kernels.py \
  tests/jaxserve/engine/test_engine_quantized_kernels.py -k "not tpu" &
part attention 150 benchmarks.correctness --only attention &
part answers 150 benchmarks.correctness --only engine --only logits &
wait
part kernels 60 benchmarks.kernels --implementation gpu --out "$out/kernels.json"
part steps 180 benchmarks.steps --out "$out/steps.json" --rows 1 --rows 8 --rows 64
part full 60 benchmarks.steps --layers 8 --rows 256 --out "$out/full.json"
part profile 60 benchmarks.step_profile --rows 64 --out "$out/profile.json"
part quantized 180 benchmarks.steps --layers 8 --kind decode --rows 1 --rows 64 --kv auto --kv fp8 \
  --weights auto --weights int8 --weights fp8 --weights int4-g128 --out "$out/quantized.json"
part products 30 benchmarks.quantized_matmul --rows 1 64 2048 --out "$out/products.json"
part together 60 benchmarks.steps --rows 1 --rows 64 --kind decode --decode-steps 8 --out "$out/together.json"
part idle 90 benchmarks.host_path --model llama3.1-8b --steps 100 --out "$out/idle.json"
part speculation 120 benchmarks.speculation --shape llama3.1-8b --layers 8 --agreement 0.8 --streams 1 --streams 16 \
  --streams 64 --runs 3 --tokens 64 --out "$out/speculation.json"

for log in "$out"/*.log; do
  echo "== $(basename "$log" .log)"
  grep -E "WRONG|^(FAILED|ERROR)" "$log"
  tail -n 20 "$log"
done
if [[ -e $out/failed ]]; then
  echo "FAILED or out of time: $(tr '\n' ' ' <"$out/failed")"
  exit 1
fi
