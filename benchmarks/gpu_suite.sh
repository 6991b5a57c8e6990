#!/usr/bin/env bash
# All that needs a GPU: tests, benchmarks against the peers, one pass over a million pairs, the
# training steps of ViTs under every precision, AdamW's step, and what the monitors cost.
#
#     benchmarks/gpu_suite.sh [--quick] [tests] [bench] [million] [precision] [optimizer] [monitors]
#
# Without steps, all six run. A step that fails does not keep the next from running; the exit
# status is 1 if any failed. --quick rehearses on the CPU at toy size.
#
#   PYTHON         interpreter; python3 if unset. Needs torch, lightning, torchmetrics, triton and
#                  pytest.
#   PYTHONPATH     kept behind the repository; put the folder that holds inf_cl there.
#   OUT            folder for what is written, from the root of the repository;
#                  benchmarks/results if unset. Rows are appended to contrastive_loss.csv,
#                  million.csv, precision.csv, optimizer_step.csv and monitor_overhead.csv;
#                  environment.txt and a log for each step are new.
#   MAX_SECONDS    a peer whose call would take longer is left out, and all timed calls of one loss
#                  at one size take no longer together; 3 if unset.
#   LIMIT_SECONDS  after this a step is stopped, with the figures that it has by then; 570 if unset.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
max_seconds=${MAX_SECONDS:-3}
limit_seconds=${LIMIT_SECONDS:-570}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
unset TRITON_INTERPRET  # kernels are to be compiled
export TQDM_MININTERVAL=20  # progress bars of logs need no ten lines a second

quick=
steps=()
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    tests | bench | million | precision | optimizer | monitors) steps+=("$argument") ;;
    *)
      echo "Passed '$argument'. Steps are tests, bench, million, precision, optimizer and monitors;" \
        "--quick rehearses on the CPU. Name some of them, or nothing for all steps." >&2
      exit 2
      ;;
  esac
done
if ((${#steps[@]} == 0)); then steps=(tests bench million precision optimizer monitors); fi
mkdir -p "$out"

failed=()

# run LOG COMMAND...: print and log what a command says, and remember whether it failed.
run() {
  local log=$out/$1 status=0 said left=$((deadline - SECONDS))
  shift
  said=${*//"$out/"/}  # logs name no place
  said=${said/"$python"/python}
  echo "+ $said" | tee -a "$log"
  timeout --kill-after=10 "$((left > 1 ? left : 1))" "$@" 2>&1 | tee -a "$log" || status=$?
  if ((status != 0)); then
    echo "failed with exit status $status" | tee -a "$log"
    failed+=("$said (exit status $status)")
  fi
}

write_environment() {
  date -u +"%Y-%m-%dT%H:%M:%SZ"
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || true
  else
    echo "no nvidia-smi"
  fi
  "$python" - <<'PYTHON' || true
import importlib.metadata, platform
import torch

print("python", platform.python_version())
print("CUDA of torch", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
print("multiprocessors", *(
    torch.cuda.get_device_properties(index).multi_processor_count
    for index in range(torch.cuda.device_count())
))
for name in ("torch", "triton", "lightning", "torchmetrics", "pytest", "inf_cl", "open_clip_torch", "torch-optimi"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
PYTHON
}

step_tests() {
  # Only files with such tests: others may need packages that are not installed here.
  local files
  mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort)
  run tests.log "$python" -m pytest -c pyproject.toml --rootdir . -p no:cacheprovider -m gpu -q \
    --durations=10 "${files[@]}"
}

step_bench() {
  local bench=("$python" benchmarks/contrastive_loss.py --csv "$out/contrastive_loss.csv")
  if [[ -n $quick ]]; then
    run bench.log "${bench[@]}" --quick --device cpu --no-memory --batch 64 128 --width 16 32 \
      --dtype bf16 fp16 fp32 --max-seconds "$max_seconds"
    return
  fi
  bench+=(--device cuda --scale 100 --max-seconds "$max_seconds")
  # A process for each width: a fault of one contender ends the process for all.
  for width in 512 768 1024; do
    run bench.log "${bench[@]}" --dtype bf16 --width "$width" \
      --batch 8192 16384 32768 65536 131072 262144
  done
  for dtype in fp16 fp32; do
    run bench.log "${bench[@]}" --dtype "$dtype" --width 768 --batch 32768
  done
}

step_million() {
  local million=("$python" benchmarks/million.py --csv "$out/million.csv")
  if [[ -n $quick ]]; then million+=(--quick --device cpu); else million+=(--device cuda); fi
  run million.log "${million[@]}"
}

step_precision() {
  local precision=("$python" benchmarks/precision.py --csv "$out/precision.csv")
  if [[ -n $quick ]]; then
    run precision.log "${precision[@]}" --quick --device cpu --rounds 1 --batch 2 --steps 1
    return
  fi
  precision+=(--device cuda --max-seconds 5)
  # The size that the targets name comes first; batches leave room for 32-true on 80 GB.
  run precision.log "${precision[@]}" --size H16 --batch 64
  run precision.log "${precision[@]}" --size L16 --batch 128
  run precision.log "${precision[@]}" --size S16 B16 --batch 256
  # The other rungs of the ladder: a pooled head and the batch second.
  run precision.log "${precision[@]}" --size H16 --batch 64 --pool mean --layout lnd \
    --precisions 16-mixed O2-fp16 --optimizers fused
}

step_optimizer() {
  local optimizer=("$python" benchmarks/optimizer_step.py --csv "$out/optimizer_step.csv")
  if [[ -n $quick ]]; then
    run optimizer.log "${optimizer[@]}" --quick --device cpu --rounds 1
    return
  fi
  # H16 would need more than 80 GB for all contenders at once.
  run optimizer.log "${optimizer[@]}" --device cuda --max-seconds 5 --size S16 B16 L16
}

step_monitors() {
  local monitors=("$python" benchmarks/monitor_overhead.py --csv "$out/monitor_overhead.csv")
  if [[ -n $quick ]]; then
    run monitors.log "${monitors[@]}" --quick --device cpu
    return
  fi
  run monitors.log "${monitors[@]}" --device cuda --batch 64 --tokens 512 --pairs 5
}

write_environment 2>&1 | tee "$out/environment.txt"
for step in "${steps[@]}"; do
  echo "== $step"
  : >"$out/$step.log"
  deadline=$((SECONDS + limit_seconds))
  "step_$step"
done

if ((${#failed[@]} > 0)); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed: ${steps[*]}"
