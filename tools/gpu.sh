#!/bin/bash
# Everything that needs a GPU, in one call on a GPU machine, which may have no network: tools/gpu.sh [stage ...]
#
#   build     pip install of this tree with the machine's own python3, CUDA code for its GPU only
#   test      the test suite on the GPU; TESTS="tests/test_scan.py -k exclusive" (say) selects
#   sanitize  compute-sanitizer (memcheck, racecheck, initcheck, synccheck) over every kernel
#   warm      compiles what bench measures, of all families at once; bench then takes about a third of the time
#   bench     python -m benchmarks for each family; BENCH="--only 128256" (say) passes arguments on
#   sweep     random problems, shapes of programs and whole programs; SWEEP="--seed 1 --problems 900" (say)
#
# By default build, test, sanitize and bench; later ones run even if an earlier one fails. Logs and results go to $OUT,
# or ./build/gpu. Without a .git directory, JAXGPUOPS_COMMIT says what is measured.
# Wheels in ./.whl are installed first: what a machine without network lacks of [build-system] and of the extra "test".
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$PWD/build/gpu}
mkdir -p "$out"
architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
summary=()

stage_build() {
  if compgen -G '.whl/*.whl' >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target build/site --upgrade .whl/*.whl || return
  fi
  CUDAARCHS=${CUDAARCHS:-$architecture-real} JAXGPUOPS_CUDA=ON python3 -m pip install -v --no-build-isolation --no-deps \
    --no-index --force-reinstall .
}

stage_test() {
  # Compiling takes most of the time, so several processes share the GPU. Of the tests for GPUs, those that are alone want
  # all of its memory. The log has each test's name as it ends: should time run out, pytest itself tells nothing.
  local failed=0
  suite() {
    JAX_PLATFORMS=cuda timeout -k 10 --signal INT "${TEST_SECONDS:-420}" python3 -P -m pytest -v --durations=5 "$@" || failed=1
  }
  suite -n 8 --dist worksteal ${TESTS:-tests} --ignore-glob '*/test_gpu_*'
  XLA_PYTHON_CLIENT_MEM_FRACTION=.18 suite -n 5 --dist worksteal -m 'not alone' tests/test_gpu_*.py
  suite -m alone tests/test_gpu_*.py
  # The forms that GPUs before compute capability 9.0 take.
  JAXGPUOPS_COMPUTE_CAPABILITY=80 XLA_PYTHON_CLIENT_MEM_FRACTION=.18 suite -n 5 --dist worksteal -m 'not alone' \
    -k 'adversarial or other_widths or same_bits or older or follow' tests/test_gpu_topk.py tests/test_gpu_scan.py
  return $failed
}

stage_sanitize() {
  local failed=0 family tool job started
  for tool in memcheck racecheck initcheck synccheck; do
    started=()
    for family in topk sorts gates rows columns streamed scans counts moe; do
      # In the streamed rows' kernel an atomic tells which warp is the last with a row, and orders what warps have stored
      # before, which racecheck does not see. synccheck (of CUDA 13.0) ends in a fault on rows, where memcheck finds none.
      case $tool-$family in racecheck-streamed | synccheck-streamed | synccheck-rows | synccheck-columns) continue ;; esac
      sanitize $tool $family &
      started+=($!)
    done
    for job in "${started[@]}"; do
      wait $job || failed=1
    done
  done
  grep -h '^kernels:' "$out"/memcheck-*.log
  return $failed
}

sanitize() {
  local log=$out/$1-$2.log
  # initcheck must see every write, those of XLA's kernels too; the others need look at ours only.
  local only='--kernel-name kns=jaxgpuops'
  [ $1 != initcheck ] || only=
  # The platform allocator gives each array its own allocation, so that a step outside is seen. XLA makes no
  # CUDA graphs, for compute-sanitizer has crashed on some of many kernels; it crashes, too, as it follows the assemblers
  # that XLA starts, so it looks at this process only.
  XLA_FLAGS=--xla_gpu_enable_command_buffer= XLA_PYTHON_CLIENT_ALLOCATOR=platform JAX_PLATFORMS=cuda \
    timeout "${SANITIZE_SECONDS:-170}" compute-sanitizer --tool $1 $only --target-processes application-only \
    --error-exitcode 9 --print-limit 20 python3 -P tools/every_kernel.py $2 >"$log" 2>&1
  local status=$?
  echo "$1 $2: exit status $status; $(tail -1 "$log")"
  [ $status -eq 0 ] || grep -m 20 -A 6 '=========' "$log"
  return $status
}

# measure FAMILY ARGUMENT..: runs a benchmark, which keeps its compiled programs for the next stage.
measure() {
  JAX_COMPILATION_CACHE_DIR=$PWD/build/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 JAX_PLATFORMS=cuda python3 -u -m benchmarks "$@"
}

families='topk sort scan softmax count moe'

stage_warm() {
  local family
  for family in $families; do
    XLA_PYTHON_CLIENT_PREALLOCATE=false measure $family --libraries jaxgpuops --out "$(mktemp -d)" ${BENCH:-} >/dev/null &
  done
  wait
}

stage_bench() {
  local rc=0 family
  for family in $families; do
    measure $family ${BENCH:-} || rc=1
  done
  cp benchmarks/results/*.json "$out"
  return $rc
}

stage_sweep() {
  local rc=0
  export JAX_PLATFORMS=cuda
  python3 -u -m benchmarks sweep ${SWEEP:---seed 1 --seconds 400} || rc=1
  python3 -u -m benchmarks sweep --shapes programs || rc=1
  python3 -u -m benchmarks programs || rc=1
  cp benchmarks/results/*.json "$out"
  return $rc
}

export PYTHONPATH=$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}
[ $# -gt 0 ] || set -- build test sanitize bench
for stage; do
  echo "==== $stage"
  start=$SECONDS
  if [ "$stage" = build ]; then
    stage_build >"$out/build.log" 2>&1
    status=$?
    if [ $status -ne 0 ]; then grep -iE -m 20 'error' "$out/build.log"; tail -n 5 "$out/build.log"; fi
  else
    "stage_$stage" 2>&1 | tee "$out/$stage.log"
    status=${PIPESTATUS[0]}
  fi
  summary+=("$stage: exit status $status after $((SECONDS - start)) s")
  [ "$status" -eq 0 ] || failed=1
done

echo "==== summary"
for stage; do
  [ "$stage" = test ] && tail -n 1 "$out/test.log"
done
printf '%s\n' "${summary[@]}"
exit ${failed:-0}
