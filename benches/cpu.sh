#!/usr/bin/env bash
# Measures the CPU kernels on one machine: limits, peers and ours in one run, on two cores.
#
#   benches/cpu.sh FLASHTILE [OUT]
#
# FLASHTILE is a release binary; nothing is built. Rows go to OUT (default: bench-cpu) as JSON lines and tables. PyTorch rows
# are measured if python3 has torch.
set -euo pipefail
flashtile=$(realpath "$1")
out=${2:-bench-cpu}
here=$(dirname "$(realpath "$0")")
mkdir -p "$out"
cpus=${CPUS:-0,1}
pinned() { taskset -c "$cpus" "$@"; }

lscpu | grep -E "Model name|Flags" | sed -E 's/(Flags:).*(amx_bf16|avx512_bf16|avx512f|avx2).*/\1 \2/' > "$out/machine.txt"
if python3 -c "import torch" 2> /dev/null; then
    pinned python3 "$here/peers/cpu_torch.py" --threads 2 --seconds 0.3 > "$out/torch.jsonl"
fi
peers=()
[ -s "$out/torch.jsonl" ] && peers=(--vs "$out/torch.jsonl")
shape() { # name, then options
    local name=$1
    shift
    pinned "$flashtile" bench "$@" --threads "${threads:-2}" --json-lines "$out/$name.jsonl" | tee "$out/$name.txt"
}
shape prefill prefill --seq 2048,4096 --head-dim 32,64,128,256 --min-time 0.3 "${peers[@]}"
threads=1 shape one-thread prefill --seq 2048 --head-dim 64,128 --min-time 0.2
shape small prefill --seq 128 --batch 4 --heads 12 --head-dim 32,64 --min-time 0.3 "${peers[@]}"
shape decode decode --min-time 0.3 "${peers[@]}"
shape prefill-avx2 prefill --isa avx2 --seq 2048 --head-dim 32,64,128,256 --min-time 0.3
shape decode-avx2 decode --isa avx2 --min-time 0.3
shape visibility visibility
