#!/usr/bin/env bash
# Measures the CPU kernels on one machine: limits, peers and ours in one run, on two cores.
#
#   benches/cpu.sh FLASHTILE [OUT]
#
# FLASHTILE is a release binary. Rows go to OUT (default: bench-cpu) as JSON lines and tables; OUT/rows.jsonl has all of them, which
# `benches/bars.py OUT/rows.jsonl --svg FILE` draws. Variables:
#
#   CPUS=0,1     the processors
#   PEERS=LIST   of torch,llama,onnx,candle (default: all), which benches/peers/run.py installs; PEERS= measures none
#   DIMS=LIST    head dims (default: 32,64,128,256)
#   KEYS=LIST    lengths of prefill, of 2048 and 4096 (default: both). Candle's fused attention takes minutes for a row of bf16 at 4096
#   QUICK=1      few problems and short times, to try the script
#
# A peer that cannot be installed or run is named with the reason at the end; then the exit status is 1.
set -euo pipefail
flashtile=$(realpath "$1")
out=${2:-bench-cpu}
here=$(dirname "$(realpath "$0")")
mkdir -p "$out"
cpus=${CPUS:-0,1}
peers=${PEERS-torch,llama,onnx,candle}
seconds=0.3 dims=${DIMS:-32,64,128,256} keys=${KEYS:-2048,4096} cached=1024,4096,8192,32768 peer_cached=1024,32768
if [ -n "${QUICK:-}" ]; then
    seconds=0.02 dims=64 keys=2048 cached=1024 peer_cached=1024
fi
decoded=$(tr , '\n' <<< "$dims" | { grep -xE '64|128|256' || true; } | paste -sd,)
few=(--head-dim "$dims" --seq "128,$keys,$peer_cached") # of small batches, prefill and decode
pinned() { taskset -c "$cpus" "$@"; }

lscpu | grep -E "Model name|Flags" | sed -E 's/(Flags:).*(amx_bf16|avx512_bf16|avx512f|avx2).*/\1 \2/' > "$out/machine.txt"
read -r load _ < /proc/loadavg
echo "load average at the start: $load" >> "$out/machine.txt"
awk -v load="$load" 'BEGIN { exit load > 0.5 }' ||
    echo "The load average is $load: other programs slow peers whose threads wait in loops (OpenMP) far more than others." >&2
: > "$out/missing.txt"
: > "$out/peers.jsonl"
if [ -n "$peers" ]; then
    python3 "$here/peers/run.py" "$out" --only "$peers" --cpus "$cpus" --seconds "$seconds" "${few[@]}" || [ -s "$out/missing.txt" ]
    # PyTorch and candle have a backward pass.
    trained=$(tr , '\n' <<< "$peers" | { grep -xE 'torch|candle' || true; } | paste -sd,)
    if [ -n "$trained" ]; then
        python3 "$here/peers/run.py" "$out/backward" --only "$trained" --cpus "$cpus" --seconds "$seconds" --head-dim "$dims" backward ||
            [ -s "$out/backward/missing.txt" ]
        cat "$out/backward/peers.jsonl" >> "$out/peers.jsonl"
        cat "$out/backward/missing.txt" >> "$out/missing.txt"
    fi
fi

cp "$out/peers.jsonl" "$out/rows.jsonl"
shape() { # name, peer rows to compare with as a regular expression or nothing, options
    local name=$1 compared=$2 vs=()
    shift 2
    if [ -n "$compared" ] && grep -Eq "$compared" "$out/peers.jsonl"; then vs=(--vs "$out/peers.jsonl"); fi
    pinned "$flashtile" bench "$@" --threads "${threads:-2}" --min-time "$seconds" "${vs[@]}" --json-lines "$out/$name.jsonl" |
        tee "$out/$name.txt"
    cat "$out/$name.jsonl" >> "$out/rows.jsonl"
}
shape prefill '"prefill".*"b": ?1,' prefill --seq "$keys" --head-dim "$dims"
threads=1 shape one-thread '' prefill --seq 2048 --head-dim "${decoded:-$dims}"
small=$(tr , '\n' <<< "$dims" | { grep -xE '32|64' || true; } | paste -sd,)
[ -z "$small" ] || shape small '"prefill".*"b": ?4,' prefill --seq 128 --batch 4 --heads 12 --head-dim "$small"
[ -z "$decoded" ] || shape decode '"decode".*"causal": ?false' decode --seq "$cached" --head-dim "$decoded"
[ -z "$decoded" ] || shape decode-int8 '"contiguous int8"' decode --seq "$peer_cached" --head-dim "$decoded" --dtype f32 --cache contiguous --codec int8
shape prefill-avx2 '' prefill --isa avx2 --seq 2048 --head-dim "$dims"
[ -z "$decoded" ] || shape decode-avx2 '' decode --isa avx2 --seq "$cached" --head-dim "$decoded"
shape backward '"backward"' backward --seq 2048 --head-dim "$dims"
if [ -s "$out/missing.txt" ]; then
    echo "These peers have no rows, or not all:" >&2
    cat "$out/missing.txt" >&2
    exit 1
fi
