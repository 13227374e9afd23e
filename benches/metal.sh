#!/usr/bin/env bash
# Checks and measures the Metal backend of one Mac, and writes a report that can be sent to flashtile's maintainers as it is.
#
#   benches/metal.sh [REPORT]
#
# Needs Rust and the command line tools of Xcode (`xcode-select --install`). It builds the command line, runs the conformance catalogue and
# random problems with Apple's API and shader validation switched on, and measures prefill and decode with both switched off. REPORT
# (default: metal-report.md) has the machine, the results and every failure. Takes about half an hour; nothing leaves the machine.
set -uo pipefail
[ "$(uname)" = Darwin ] || { echo "benches/metal.sh: needs macOS, this is $(uname)" >&2; exit 2; }
report=$(cd "$(dirname "${1:-metal-report.md}")" && pwd)/$(basename "${1:-metal-report.md}")
cd "$(dirname "$0")/.." || exit 2
cargo build --release --locked -p flashtile-cli || exit 1
flashtile=${CARGO_TARGET_DIR:-target}/release/flashtile
failed=0

# A section of the report: its title, then a command whose output it has.
section() {
    local title=$1 status
    shift
    echo "== $title"
    { printf '\n## %s\n\n```text\n$ %s\n' "$title" "$*"; } >> "$report"
    "$@" 2>&1 | tee -a "$report"
    status=${PIPESTATUS[0]}
    printf '```\n\nexit status %s\n' "$status" >> "$report"
    [ "$status" -eq 0 ] || failed=1
}

printf '# flashtile on Metal\n\n' > "$report"
section "machine" sw_vers
section "chip" sysctl -n machdep.cpu.brand_string hw.memsize
section "gpu" system_profiler SPDisplaysDataType
section "version" git log -1 --format=%H
section "info" "$flashtile" info

# Apple's own checks of every call and of every access of a kernel: a broken rule ends the process.
export MTL_DEBUG_LAYER=1 MTL_DEBUG_LAYER_ERROR_MODE=assert MTL_SHADER_VALIDATION=1
section "conformance, validated" "$flashtile" check --backend metal --seeds 0..100
section "a file, twice" bash -c "
    for n in 1 2; do $flashtile run examples/data/minilm_attention.safetensors -o \"\$TMPDIR/flashtile-\$n.safetensors\" --backend metal || exit 1; done
    cmp \"\$TMPDIR/flashtile-1.safetensors\" \"\$TMPDIR/flashtile-2.safetensors\" && echo 'the same bits'"
unset MTL_DEBUG_LAYER MTL_DEBUG_LAYER_ERROR_MODE MTL_SHADER_VALIDATION

section "prefill" "$flashtile" bench prefill --backend metal --dtype f16,bf16 --head-dim 64,128,256 --seq 1024,4096
section "decode" "$flashtile" bench decode --backend metal --dtype f16 --head-dim 128 --seq 4096,32768 --batch 1,8
section "decode over quantized caches" \
    "$flashtile" bench decode --backend metal --dtype f16 --head-dim 128 --seq 32768 --batch 1 --cache paged --codec f16,int8,fp8,tq4
section "several queries" "$flashtile" bench decode --backend metal --dtype f16 --head-dim 128 --seq 32768 --batch 1 --cache paged --queries 8
section "several queries, more" "$flashtile" bench decode --backend metal --dtype f16 --head-dim 128 --seq 32768 --batch 1 --cache paged --queries 16

echo
if [ "$failed" -eq 0 ]; then echo "all passed: $report"; else echo "something failed: $report says what"; fi
exit "$failed"
