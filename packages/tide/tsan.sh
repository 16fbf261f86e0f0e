#!/bin/sh
# The stress test under ThreadSanitizer, then a control with a real race that must be found.
# Works in a copy, so that the instrumented build never meets the ordinary one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here/csrc" "$here/tide" "$here/tests" "$here/setup.py" "$here/pyproject.toml" "$here/README.md" "$work"
rm -f "$work"/tide/_C*.so
cd "$work"
TIDE_SANITIZE=thread python setup.py -q build_ext --inplace

cat > control.py <<'PY'
import threading, time, tide, torch
until = time.monotonic() + 4
def use():
    x = torch.ones(4, device="tide")
    while time.monotonic() < until:
        x.add_(1)
def reconfigure():
    while time.monotonic() < until:
        tide.configure(poison=True)
threads = [threading.Thread(target=target) for target in (use, use, reconfigure)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
PY

run() { # log name, command
  log=$1; shift
  TSAN_OPTIONS="exitcode=0 ignore_noninstrumented_modules=1 log_path=$work/$log" \
    LD_PRELOAD=$(gcc -print-file-name=libtsan.so) PYTHONPATH=$work OMP_NUM_THREADS=1 \
    TIDE_STRESS_SECONDS=${TIDE_STRESS_SECONDS:-30} setarch -R "$@"
}
count() { cat "$work"/"$1".* 2>/dev/null | grep -c 'WARNING: ThreadSanitizer' || true; }

run stress.log python -m pytest -q -s -p no:cacheprovider tests/test_stress.py tests/test_async.py
run control.log python control.py
echo "ThreadSanitizer: $(count stress.log) reports in the tests, $(count control.log) in the control"
cat "$work"/stress.log.* 2>/dev/null || true
[ "$(count stress.log)" = 0 ] && [ "$(count control.log)" != 0 ]
