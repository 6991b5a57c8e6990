#!/usr/bin/env bash
# All that needs a GPU, in steps of less than nine minutes: tests, ranks over NCCL, the loss against
# its peers, a million pairs, ViTs under every precision, AdamW's step, what the monitors cost, and
# the ladder of a faster ViT.
#
#     benchmarks/gpu_suite.sh [--list] [--minutes N] [STEP...]
#
# The figure that matters comes first: the loss in bf16 beside its peers. With --minutes only those
# steps run whose limits fit into so many minutes together, first come, first served: 10 are enough
# for `smoke` and that figure, 30 for the tests as well, 120 for most of all.
# Steps run in the order of --list, all of them if none is named; `loss` names all that begin with
# it. A step that fails does not keep the next from running, but for `smoke`, every benchmark at toy
# size: if that fails, nothing else runs unless it is named. The exit status is 1 if a step failed.
# A step that has passed with this commit is not run again, and rows of a CSV file that are measured
# again take the place of the old ones; so a suite that was cut off is just started again.
#
# Kernels can be compiled before there is a GPU, and the folder carried to it (same wheels):
#
#     TRITON_CACHE_DIR=kernels python benchmarks/compile_ahead.py --arch 90
#
#   PYTHON         interpreter; python3 if unset. Needs torch, lightning, torchmetrics, triton and
#                  pytest; `ladder`, which comes last, matplotlib and pillow. The loss beside its
#                  peers (benchmarks/contrastive_loss.py) needs torch and triton alone.
#   PYTHONPATH     kept behind the repository; put the folder that holds inf_cl there.
#   OUT            folder for what is written, from the root of the repository;
#                  benchmarks/results if unset: suite.log, passed.txt, four CSV files, meta-vit/.
#   KERNELS        folder of compiled kernels; kernels if unset.
#   MAX_SECONDS    a peer whose call would take longer is left out, and all timed calls of one loss
#                  at one size take no longer together; 3 if unset.
#   LIMIT_SECONDS  no step gets more; 530 if unset. It is interrupted as by Ctrl-C, and killed if it
#                  is there 10 seconds later.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
max_seconds=${MAX_SECONDS:-3}
limit_seconds=${LIMIT_SECONDS:-530}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
unset TRITON_INTERPRET  # kernels are to be compiled
export TRITON_CACHE_DIR=${KERNELS:-$PWD/kernels}
export TQDM_MININTERVAL=20  # progress bars of logs need no ten lines a second

names=() limits=() commands=()

if [[ $python$out =~ [[:space:]] ]]; then
  echo "Passed PYTHON='$python' and OUT='$out'. Neither may have blanks: commands are split at them." >&2
  exit 2
fi

# step NAME SECONDS ARGUMENTS...: note a step of the interpreter.
step() {
  names+=("$1") limits+=("$2") commands+=("$python ${*:3}")
}

# csv SCRIPT ARGUMENTS...: the command of a benchmark with a file of its own.
csv() { echo "benchmarks/$1.py --device cuda --csv $out/$1.csv ${*:2}"; }

loss() { csv contrastive_loss --max-seconds "$max_seconds" "$@"; }
vit() { csv precision --max-seconds 5 "$@"; }

# Only files with such tests: others may need packages that are not installed here.
tests() {
  echo "-m pytest -c pyproject.toml --rootdir . -p no:cacheprovider -m gpu -v --tb=short -W default" \
    "--durations=10 -o faulthandler_timeout=120 $*"
}
gpu_tests() {
  grep -rl --include='test_*.py' 'mark\.gpu' tests | grep -v -e nccl -e benchmarks | sort | xargs
}

list_steps() {
  step smoke 60 "$(tests tests/benchmarks/test_gpu_benchmarks.py)"
  step loss-bf16 530 "$(loss --dtype bf16 --width 768 --batch 32768 65536)"
  step tests 530 "$(tests "$(gpu_tests)")"
  step nccl 300 "$(tests tests/contrastive/test_nccl.py)"
  # What the targets name: each dtype and width at the middle sizes.
  step loss-fp16 300 "$(loss --dtype fp16 --width 768 --batch 32768)"
  step loss-fp32 530 "$(loss --dtype fp32 --width 768 --batch 32768)"
  step precision-H16 530 "$(vit --size H16 --batch 64)"
  # H16 would need more than 80 GB for all contenders at once.
  step optimizer 400 "$(csv optimizer_step --max-seconds 5 --size S16 B16 L16)"
  step million 400 "$(loss --dtype bf16 --width 768 --batch 1048576 --repeats 1)"
  step sigmoid 400 \
    "$(loss --objective sigmoid --scale 10 --dtype bf16 --width 768 --batch 32768 65536)"
  step monitors 400 "$(csv monitor_overhead --batch 64 --tokens 512 --pairs 5)"
  step kernels 300 benchmarks/compile_ahead.py
  # The extras. A process for each width: a fault of one contender ends the process for all.
  step loss-512 530 "$(loss --dtype bf16 --width 512 --batch 8192 16384 32768 65536 131072 262144)"
  step loss-768 530 "$(loss --dtype bf16 --width 768 --batch 8192 16384 131072 262144)"
  step loss-1024 530 "$(loss --dtype bf16 --width 1024 --batch 8192 16384 32768 65536 131072 262144)"
  step precision-L16 530 "$(vit --size L16 --batch 128)"
  step precision-small 530 "$(vit --size S16 B16 --batch 256)"
  # The other rungs of the ladder: a pooled head and the batch second.
  step precision-lnd 400 \
    "$(vit --size H16 --batch 64 --pool mean --layout lnd --precisions 16-mixed O2-fp16 --optimizers fused)"
  step ladder 530 "-m papers meta-vit --output $out"
}

only_list='' minutes='' wanted=()
while (($# > 0)); do
  case $1 in
    --list) only_list=1 ;;
    --minutes) minutes=${2-} && shift ;;
    *) wanted+=("$1") ;;
  esac
  shift || true
done
if [[ -n $minutes && ! $minutes =~ ^[1-9][0-9]*$ ]]; then
  echo "Passed --minutes '$minutes'. It must be a whole number, such as 10, 30 or 120." >&2
  exit 2
fi
list_steps
for name in ${wanted[@]+"${wanted[@]}"}; do
  if [[ " ${names[*]}" != *" $name"* ]]; then
    echo "Passed '$name'. Steps are ${names[*]}, or how some of them begin. Name some of them, or" \
      "nothing for all." >&2
    exit 2
  fi
done
if [[ -n $minutes ]]; then
  left=$((60 * minutes)) fitting=()
  for index in "${!names[@]}"; do
    limit=${limits[index]}
    ((limit <= limit_seconds)) || limit=$limit_seconds
    ((limit <= left)) || continue
    left=$((left - limit))
    fitting+=("$index")
  done
  for index in "${!names[@]}"; do
    [[ " ${fitting[*]-} " == *" $index "* ]] || unset "names[index]" "limits[index]" "commands[index]"
  done
fi
is_wanted() {
  ((${#wanted[@]} == 0)) && return
  local name
  for name in "${wanted[@]}"; do [[ $1 == "$name"* ]] && return; done
  return 1
}
if [[ -n $only_list ]]; then
  for index in "${!names[@]}"; do echo "${names[index]} (${limits[index]} s): ${commands[index]}"; done
  exit
fi

mkdir -p "$out"
log=$out/suite.log passed=$out/passed.txt
touch "$passed"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)

describe_machine() {
  date -u +"%Y-%m-%dT%H:%M:%SZ commit $commit"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null ||
    echo "no nvidia-smi"
  "$python" -m torch.utils.collect_env 2>/dev/null |
    grep -E '^(Python|PyTorch|CUDA|cuDNN|Nvidia|GPU|Is CUDA|\[pip3\])' || true
}

failed=()
# run INDEX: print and log what a step says, and remember how it ended.
run() {
  local name=${names[$1]} limit=${limits[$1]} command status=0 said start=$SECONDS
  ((limit <= limit_seconds)) || limit=$limit_seconds
  read -ra command <<<"${commands[$1]}"
  said=${commands[$1]//"$out/"/}  # logs name no place
  echo "+ ${said/"$python"/python}"
  timeout --signal=INT --kill-after=10 "$limit" "${command[@]}" 2>&1 || status=$?
  case $status in
    0) echo "$name $commit" >>"$passed" ;;
    124 | 137) echo "stopped after its $limit s" ;;
    *) echo "failed with exit status $status" ;;
  esac
  echo "== $name took $((SECONDS - start)) s"
  return "$status"
}

describe_machine 2>&1 | tee -a "$log"
for index in "${!names[@]}"; do
  name=${names[index]}
  is_wanted "$name" || continue
  if [[ $name != smoke ]] && grep -qxF "$name $commit" "$passed"; then
    echo "== $name has passed with this commit" | tee -a "$log"
    continue
  fi
  echo "== $name" | tee -a "$log"
  status=0
  run "$index" | tee -a "$log" || status=${PIPESTATUS[0]}
  ((status == 0)) && continue
  failed+=("$name (exit status $status)")
  if [[ $name == smoke && ${#wanted[@]} == 0 ]]; then
    echo "smoke failed: nothing else is run. Name steps to run them all the same." | tee -a "$log"
    break
  fi
done

if ((${#failed[@]} > 0)); then
  printf 'failed: %s\n' "${failed[@]}" | tee -a "$log"
  exit 1
fi
echo "all passed" | tee -a "$log"
