#!/usr/bin/env bash
# Everything that needs a GPU, in steps of less than nine minutes. No step uses the network.
#
#     benchmarks/gpu_suite.sh [--list] [--minutes N] [STEP...]
#
# The figure that matters comes first: the loss in bf16 beside its peers. With `--minutes N` the
# steps whose time limits fit into N minutes together run, in the order of `--list`: 10 minutes are
# enough for `smoke` and that figure, 30 for the tests and the tile shapes as well, 120 for nearly
# everything.
# Steps run in the order of `--list`, all of them if none is named; `loss` names all steps whose
# names begin with it. A step that fails does not stop the next one, except `smoke`, which runs every
# benchmark at toy size: if it fails, only steps that are named run. The exit status is 1 if a step
# failed. A step that passed with this commit is not run again, and rows of a CSV file that are
# measured again replace the old rows, so an interrupted suite is simply started again. Every table
# is written to its CSV file as soon as it is measured, and at the end a summary of all tables goes
# to summary.md in Markdown.
#
# Kernels can be compiled before there is a GPU, and the folder carried to it (same wheels):
#
#     TRITON_CACHE_DIR=kernels python benchmarks/compile_ahead.py --arch 90
#
#   PYTHON         interpreter; python3 if unset. `smoke` and the steps named `loss`, `tiles`,
#                  `sigmoid`, `million` and `kernels` need torch and triton alone; the others need
#                  lightning and torchmetrics, the tests pytest, `ladder` matplotlib and pillow.
#   PYTHONPATH     searched after the repository; put the folder that holds inf_cl there.
#   OUT            output folder, relative to the root of the repository; benchmarks/results if
#                  unset: suite.log, passed.txt, summary.md, five CSV files, meta-vit/.
#   KERNELS        folder of compiled kernels; kernels if unset.
#   COMMIT         commit of a copy without .git, for the log; that of the repository if unset.
#   MAX_SECONDS    a peer whose call would take longer is left out, and all timed calls of one loss
#                  at one size take at most that long together; 3 if unset.
#   LIMIT_SECONDS  upper bound of every step's time limit; 530 if unset. At its limit a step is
#                  interrupted as by Ctrl-C, and killed 10 seconds later.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
max_seconds=${MAX_SECONDS:-3}
limit_seconds=${LIMIT_SECONDS:-530}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
unset TRITON_INTERPRET  # compile the kernels
export TRITON_CACHE_DIR=${KERNELS:-$PWD/kernels}
export TQDM_MININTERVAL=20  # seconds between updates of a progress bar, which fill the log

names=() limits=() commands=()

if [[ $python$out =~ [[:space:]] ]]; then
  echo "Passed PYTHON='$python' and OUT='$out'. Use paths without blanks: commands are split there." >&2
  exit 2
fi

# step NAME SECONDS ARGUMENTS...: add a step, the arguments of the interpreter.
step() {
  names+=("$1") limits+=("$2") commands+=("$python ${*:3}")
}

# csv SCRIPT ARGUMENTS...: print the arguments that run a benchmark into its CSV file.
csv() { echo "benchmarks/$1.py --device cuda --csv $out/$1.csv ${*:2}"; }

loss() { csv contrastive_loss --max-seconds "$max_seconds" "$@"; }
vit() { csv precision --max-seconds 5 "$@"; }

# Only files with tests for GPUs, because other files may need packages that are not installed.
tests() {
  echo "-m pytest -c pyproject.toml --rootdir . -p no:cacheprovider -m gpu -v --tb=short -W default" \
    "--durations=10 -o faulthandler_timeout=120 $*"
}
gpu_tests() {
  grep -rl --include='test_*.py' 'mark\.gpu' tests | grep -v -e nccl -e benchmarks | sort | xargs
}

list_steps() {
  step smoke 60 benchmarks/smoke.py
  step loss-bf16 530 "$(loss --dtype bf16 --width 768 --batch 32768 65536)"
  step tests 530 "$(tests "$(gpu_tests)")"
  step nccl 300 "$(tests tests/contrastive/test_nccl.py)"
  step precision-H16 530 "$(vit --size H16 --batch 64)"
  # H16 would need more than 80 GB for all contenders together.
  step optimizer 400 "$(csv optimizer_step --max-seconds 5 --size S16 B16 L16)"
  step ladder 530 "-m papers meta-vit --output $out"
  step tiles 300 "$(csv tile_rows)"
  # The dtypes and widths of the targets at the middle sizes.
  step loss-fp16 300 "$(loss --dtype fp16 --width 768 --batch 32768)"
  step loss-fp32 530 "$(loss --dtype fp32 --width 768 --batch 32768)"
  step sigmoid 400 \
    "$(loss --objective sigmoid --scale 10 --dtype bf16 --width 768 --batch 32768 65536)"
  step million 400 "$(loss --dtype bf16 --width 768 --batch 1048576 --repeats 1)"
  step monitors 400 "$(csv monitor_overhead --batch 64 --tokens 512 --pairs 5)"
  step kernels 300 benchmarks/compile_ahead.py
  # All other sizes, a process for each width: a fault of one contender ends the whole process.
  step loss-512 530 "$(loss --dtype bf16 --width 512 --batch 8192 16384 32768 65536 131072 262144)"
  step loss-768 530 "$(loss --dtype bf16 --width 768 --batch 8192 16384 131072 262144)"
  step loss-1024 530 "$(loss --dtype bf16 --width 1024 --batch 8192 16384 32768 65536 131072 262144)"
  step precision-L16 530 "$(vit --size L16 --batch 128)"
  step precision-small 530 "$(vit --size S16 B16 --batch 256)"
  # The rungs of the ladder that are not measured above: a pooled head, and the batch second.
  step precision-lnd 400 \
    "$(vit --size H16 --batch 64 --pool mean --layout lnd --precisions 16-mixed O2-fp16 --optimizers fused)"
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
  echo "Passed --minutes '$minutes'. Pass a whole number, such as 10, 30 or 120." >&2
  exit 2
fi
list_steps
for name in ${wanted[@]+"${wanted[@]}"}; do
  if [[ " ${names[*]}" != *" $name"* ]]; then
    echo "Passed '$name'. Pass names of steps or how they begin, or nothing for all steps:" \
      "${names[*]}." >&2
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
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}

describe_machine() {
  date -u +"%Y-%m-%dT%H:%M:%SZ commit $commit"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null ||
    echo "no nvidia-smi"
  "$python" -m torch.utils.collect_env 2>/dev/null |
    grep -E '^(Python|PyTorch|CUDA|cuDNN|Nvidia|GPU|Is CUDA|\[pip3\])' || true
}

failed=()
# run INDEX: run a step, print its output, and record that it passed.
run() {
  local name=${names[$1]} limit=${limits[$1]} command status=0 said start=$SECONDS
  ((limit <= limit_seconds)) || limit=$limit_seconds
  read -ra command <<<"${commands[$1]}"
  said=${commands[$1]//"$out/"/}  # no paths of this machine in the log
  echo "+ ${said/"$python"/python}"
  timeout --signal=INT --kill-after=10 "$limit" "${command[@]}" 2>&1 || status=$?
  case $status in
    0) echo "$name $commit" >>"$passed" ;;
    124 | 137) echo "stopped at its limit of $limit s" ;;
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
    echo "== $name passed before with this commit" | tee -a "$log"
    continue
  fi
  echo "== $name" | tee -a "$log"
  status=0
  run "$index" | tee -a "$log" || status=${PIPESTATUS[0]}
  ((status == 0)) && continue
  failed+=("$name (exit status $status)")
  if [[ $name == smoke && ${#wanted[@]} == 0 ]]; then
    echo "smoke failed, so no other step runs. Name steps to run them all the same." | tee -a "$log"
    break
  fi
done

# The CSV files may hold figures of CPUs as well, which the summary leaves out.
"$python" benchmarks/tables.py --results "$out" --chip NVIDIA | tee "$out/summary.md" || true

if ((${#failed[@]} > 0)); then
  printf 'failed: %s\n' "${failed[@]}" | tee -a "$log"
  exit 1
fi
echo "all passed" | tee -a "$log"
