#!/usr/bin/env bash
# Checks and measures the CUDA backend on one machine: answers, limits, ours and peers in one run.
#
#   benches/gpu.sh FLASHTILE [OUT [STEP...]]
#
# FLASHTILE is a release binary; nothing is built. Rows go to OUT (default: bench-gpu) as JSON lines and tables. PyTorch rows
# are measured if python3 has torch. Steps, all by default: check, tests, prefill, decode, backward, portable (portable and
# native kernels), kernels (each kernel of the kernel language, compared with a copy), start, sanitize (if compute-sanitizer is
# installed). The step tests runs integration tests: of the library's devices if TESTS names its test binary, of crates/kernel,
# except its tests of rustc's messages, if KERNEL_TESTS names that crate's, of the building blocks of Hopper's kernels if UNIT_TESTS
# names the unit tests of crates/cuda, and of the Python package on tensors of PyTorch if WHEELS names a folder with its wheel, pytest
# and what that needs; transformers there are tested too. With WHEELS, the Python package and its peers are also measured in turns.
# The step prefill runs the benchmark benches/packed.rs if PACKED names its binary, the step kernels benches/kernels if KERNELS does.
set -euo pipefail
flashtile=$(realpath "$1")
out=$(realpath -m "${2:-bench-gpu}")
shift $(($# < 2 ? $# : 2))
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(check tests prefill decode backward portable kernels start sanitize)
root=$(dirname "$(dirname "$(realpath "$0")")")
mkdir -p "$out"
cd "$root"
wants() { local p; for p in "${steps[@]}"; do [ "$p" = "$1" ] && return; done; return 1; }
step() { printf '\n== %s\n' "$*"; }

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv > "$out/machine.txt"
cat "$out/machine.txt"
torch=
python3 -c "import torch; torch.zeros(1).cuda()" 2> /dev/null && torch=1
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -r "$site"' EXIT
    for wheel in "$WHEELS"/*.whl; do python3 -m zipfile -e "$wheel" "$site/all"; done
    for wheel in "$WHEELS"/flashtile-*.whl; do python3 -m zipfile -e "$wheel" "$site/flashtile"; done
fi

# The catalogue and 400 random problems by native or portable kernels, and two runs on the same file. Nearly every case compiles its
# own kernel, and a process compiles one at a time.
answers() {
    local kernels=$1 n failed= names
    n=$(nproc)
    for ((i = 0; i < n; i++)); do
        "$flashtile" check --backend cuda --kernels $kernels --seeds 0..400 --shard "$i/$n" > "$out/check-$kernels-$i.txt" &
    done
    for ((i = 0; i < n; i++)); do wait -n || failed=1; done
    names=("$out/check-$kernels"-*.txt)
    [ -z "$failed" ] || { grep -h FAILED "${names[@]}"; exit 1; }
    cat "${names[@]}" > "$out/check-$kernels.txt"
    rm "${names[@]}"
    python3 -c "
import re, sys
sums = [0, 0, 0]
for line in open(sys.argv[1]):
    if row := re.match(r'cuda .*? +(\d+) +(\d+) +(\d+) +[\d.]+%', line):
        sums = [a + int(b) for a, b in zip(sums, row.groups())]
print('%d passed, %d failed, %d skipped' % tuple(sums))" "$out/check-$kernels.txt"
    for n in 1 2; do
        "$flashtile" run examples/data/minilm_attention.safetensors -o "$out/minilm$n.safetensors" --backend cuda --kernels $kernels
    done
    cmp "$out"/minilm[12].safetensors && rm "$out"/minilm[12].safetensors
}

if wants check; then
    step "answers"
    answers native
fi

if wants tests && [ -n "${TESTS:-}" ]; then
    step "tests"
    # A process compiles one kernel at a time: the catalogue with every tile of wgmma is shared among several.
    wgmma=the_catalogue_passes_with_tiles_of_wgmma
    CARGO_MANIFEST_DIR=$root "$TESTS" --nocapture --skip $wgmma cuda:: portable:: edges:: external:: nan_in infinity least_finite \
        > "$out/tests.txt" 2>&1 || { tail -40 "$out/tests.txt"; exit 1; }
    grep -E "SKIPPED|test result" "$out/tests.txt"
    n=$(nproc)
    for ((i = 0; i < n; i++)); do
        FLASHTILE_SHARD=$i/$n RAYON_NUM_THREADS=1 CARGO_MANIFEST_DIR=$root "$TESTS" --nocapture $wgmma > "$out/wgmma-$i.txt" 2>&1 &
    done
    for ((i = 0; i < n; i++)); do wait -n || { tail -n 20 "$out"/wgmma-*.txt; exit 1; }; done
    cat "$out"/wgmma-*.txt | awk '/^[0-9]+ passed$/ { sum += $1 } /SKIPPED/ { print } END { print sum + 0 " passed with tiles of wgmma" }'
    rm "$out"/wgmma-*.txt
fi

if wants tests && [ -n "${KERNEL_TESTS:-}" ]; then
    step "tests of the kernel language"
    CARGO_MANIFEST_DIR=$root/crates/kernel "$KERNEL_TESTS" --nocapture --skip ui:: > "$out/kernel-tests.txt" 2>&1 ||
        { tail -40 "$out/kernel-tests.txt"; exit 1; }
    grep -E "SKIPPED|test result" "$out/kernel-tests.txt"
fi

if wants tests && [ -n "${UNIT_TESTS:-}" ]; then
    step "tests of the building blocks of kernels"
    "$UNIT_TESTS" --nocapture sm90_tests:: > "$out/unit-tests.txt" 2>&1 || { tail -40 "$out/unit-tests.txt"; exit 1; }
    grep -E "SKIPPED|test result" "$out/unit-tests.txt"
fi

if wants tests && [ -n "${WHEELS:-}" ]; then
    step "tests of the Python package"
    cp python/tests/*.py "$site/all"
    (cd "$site/all" && PYTHONPATH=$site/all python3 -m pytest -q -rs test_cuda.py test_cuda_gradients.py) > "$out/python-tests.txt" 2>&1 || { tail -40 "$out/python-tests.txt"; exit 1; }
    tail -1 "$out/python-tests.txt"
fi

# Measures flashtile on one problem, before and after the peers if there are any, and the Python package in turns with these: NAME, the problem
# for the peers, options of flashtile.
compare() {
    local name=$1 problem=$2
    shift 2
    local vs=()
    if [ -n "$torch" ] && [ -n "$problem" ]; then
        ours "$name" "$@"
        PYTHONPATH=${site:+$site/flashtile${PYTHONPATH:+:}}${PYTHONPATH:-} python3 benches/peers/cuda_torch.py "$out/torch-$name.jsonl" $problem | tee -a "$out/turns-$name.txt"
        vs=(--vs "$out/torch-$name.jsonl")
    fi
    ours "$name" "$@" "${vs[@]}"
}

# Measures flashtile: NAME, options.
ours() {
    local name=$1
    shift
    "$flashtile" bench "$@" --backend cuda --dtype "${dtype:-bf16}" --min-time 0.2 --json-lines "$out/row.jsonl" | tee -a "$out/$name.txt"
    cat "$out/row.jsonl" >> "$out/$name.jsonl"
    rm "$out/row.jsonl"
}

if wants prefill; then
    step "prefill: batch * length = 16384, heads = 2048 / head dimension"
    for s in 1024 2048 4096 16384; do
        b=$((16384 / s))
        for d in 64 128 256; do
            compare prefill "prefill $d $s $b" prefill --head-dim $d --heads $((2048 / d)) --seq $s --batch $b
        done
        compare prefill "prefill 128 $s $b 64 8" prefill --head-dim 128 --heads 64 --kv-heads 8 --seq $s --batch $b
        compare prefill "prefill 192 $s $b 16 16 128" prefill --head-dim 192 --value-dim 128 --heads 16 --seq $s --batch $b
    done
    step "windows, wide heads, f16, f32"
    compare prefill "prefill 128 16384 1 16 16 128 1023" prefill --head-dim 128 --heads 16 --seq 16384 --causal --window 1023
    compare prefill "prefill 64 16384 1 64 8 64 127" prefill --head-dim 64 --heads 64 --kv-heads 8 --seq 16384 --causal --window 127
    compare prefill "" prefill --head-dim 512 --heads 4 --seq 4096 --batch 4
    compare prefill "" prefill --head-dim 512 --heads 64 --kv-heads 1 --seq 8192 --causal
    dtype=f16 compare prefill "" prefill --head-dim 128 --heads 16 --seq 4096 --batch 4
    dtype=f32 compare prefill "" prefill --head-dim 128 --heads 16 --seq 4096 --batch 4
    step "chunks of 256 queries over a cache"
    for s in 8192 32768 65536; do
        compare chunks "" decode --cache contiguous --queries 256 --head-dim 128 --heads 8 --kv-heads 1 --batch 1 --seq $s
    done
    if [ -n "${PACKED:-}" ]; then
        step "sequences of 256 to 8192 tokens: packed, and one by one"
        "$PACKED" | tee "$out/packed.txt"
    else
        echo "SKIPPED: a packed batch beside its sequences: PACKED names no binary"
    fi
    step "prefill of whole sequences in pages and without"
    for page in 16 64; do
        compare pages "" decode --cache contiguous,paged --page $page --queries 4096 --head-dim 128 --heads 16 --kv-heads 16 --batch 4 --seq 4096
    done
fi

if wants decode; then
    step "decode"
    for row in "128 1 1024 32 8" "128 1 8192 32 8" "128 1 131072 32 8" "128 16 8192 32 8" "128 64 4096 32 8" \
        "256 1 8192 16 2" "256 1 131072 16 2" "256 64 4096 16 2" "64 1 8192 32 8" "64 64 4096 32 8"; do
        read -r d b s h hkv <<< "$row"
        compare decode "decode $d $s $b $h $hkv" decode --head-dim $d --batch $b --seq $s --heads $h --kv-heads $hkv
    done
    step "caches: contiguous and pages in random order, in turns"
    for page in 16 64; do
        compare decode "" decode --head-dim 128 --batch 64 --seq 4096 --cache contiguous,paged --page $page
    done
    step "lengths: the same sum, equal and from 100 to 16000"
    compare decode "" decode --head-dim 128 --batch 64 --seq 8050,100..16000 --cache contiguous
fi

if wants backward; then
    step "backward pass: 16 heads"
    for d in 64 128; do
        for s in 2048 4096 16384; do
            compare backward "backward $d $s 1 16" backward --head-dim $d --heads 16 --seq $s
        done
        compare backward "backward $d 4096 1 32 8" backward --head-dim $d --heads 32 --kv-heads 8 --seq 4096
    done
    # Kernels by mma.sync, which devices before Hopper take, on any device.
    for d in 64 128; do compare backward "" backward --head-dim $d --heads 16 --seq 4096 --tile 8,1,1,64,2,1,0; done
    compare backward "backward 256 4096 1 8" backward --head-dim 256 --heads 8 --seq 4096
    dtype=f16 compare backward "" backward --head-dim 128 --heads 16 --seq 4096
    dtype=f32 compare backward "" backward --head-dim 64 --heads 16 --seq 2048
fi

if wants portable; then
    step "answers of the portable kernels"
    answers portable
    step "decode: native, then portable"
    for row in "128 1 8192 32 8" "128 1 131072 32 8" "128 16 8192 32 8" "128 64 4096 32 8" "64 64 4096 32 8" "256 64 4096 16 2"; do
        read -r d b s h hkv <<< "$row"
        shape=(decode --head-dim $d --batch $b --seq $s --heads $h --kv-heads $hkv)
        compare portable "decode $d $s $b $h $hkv" "${shape[@]}"
        compare portable "" "${shape[@]}" --kernels portable
    done
    for t in f16 f32; do
        dtype=$t compare portable "" decode --head-dim 128 --batch 16 --seq 8192 --heads 32 --kv-heads 8 --kernels portable
    done
    compare portable "" decode --head-dim 128 --batch 64 --seq 4096 --cache contiguous,paged,ring --page 16 --kernels portable
    step "prefill: native, then portable"
    for d in 64 128; do
        compare portable "prefill $d 4096 1" prefill --head-dim $d --heads $((2048 / d)) --seq 4096
        compare portable "" prefill --head-dim $d --heads $((2048 / d)) --seq 4096 --kernels portable
    done
fi

if wants kernels; then
    step "kernels of the kernel language: what they move, and their times beside a copy"
    if [ -n "${KERNELS:-}" ]; then
        "$KERNELS" --cuda 0 --json-lines "$out/kernels.jsonl" | tee "$out/kernels.txt"
    else
        echo "SKIPPED: each kernel by itself: KERNELS names no binary"
    fi
fi

if wants start; then
    step "first call: without and with compiled kernels on disk"
    folder=$(mktemp -d)
    problems=("decode --dtype bf16 --head-dim 128 --seq 8192")
    # Most forms of Hopper's kernel: type, head dimension, value dimension, tokens, heads.
    for shape in "bf16 64 64 1024 16" "bf16 64 64 4096 16" "bf16 64 64 8192 16" "bf16 96 96 2048 16" "bf16 128 128 4096 16" \
        "bf16 128 128 576 256" "bf16 192 128 4096 16" "bf16 192 192 4096 16" "bf16 256 256 2048 16" "bf16 256 256 8192 16" \
        "bf16 512 512 4096 16" "f32 64 64 4096 16" "f32 128 128 4096 16" "f32 256 256 4096 16"; do
        read -r t d dv s h <<< "$shape"
        problems+=("prefill --dtype $t --head-dim $d --value-dim $dv --heads $h --seq $s --causal")
    done
    for state in cold warm; do
        # The compiler has a cache of its own, which would make a cold start warm.
        for problem in "${problems[@]}"; do
            CUDA_CACHE_DISABLE=1 FLASHTILE_CACHE_DIR=$folder "$flashtile" bench $problem --backend cuda --min-time 0.05 \
                --json-lines "$folder/row.jsonl" > /dev/null
            python3 -c "
import json
row = json.loads(open('$folder/row.jsonl').readline())
print('$state, $problem: %.1f ms to the first launch, %.1f us of the host for each' % (row['prepare_seconds'] * 1e3, row['host_seconds'] * 1e6))"
            cat "$folder/row.jsonl" >> "$out/start-$state.jsonl"
            rm "$folder/row.jsonl"
        done
    done
    rm -r "$folder"
fi

if wants sanitize && command -v compute-sanitizer > /dev/null; then
    some=gqa_4_causal,mask_f16_window,like_,cached_steps_pages_of_8,cached_ring_41,tree_branches_verify,keys_16,decode_long
    codes=quantized_ring_tq3,quantized_ring_mlx-tq6,quantized_centered_tq4,quantized_d3x1,quantized_steps_d128_tq4,quantized_steps_d128_fp8
    if [ -n "${TESTS:-}" ]; then
        step "memcheck, tiles of wgmma"
        CARGO_MANIFEST_DIR=$root FLASHTILE_SHARD=10/200 compute-sanitizer --tool memcheck --error-exitcode 9 --kernel-name kns=forward \
            "$TESTS" --nocapture the_catalogue_passes_with_tiles_of_wgmma > "$out/memcheck-wgmma.txt" 2>&1 || { tail -40 "$out/memcheck-wgmma.txt"; exit 1; }
        grep -E "ERROR SUMMARY|^[0-9]+ passed" "$out/memcheck-wgmma.txt"
    fi
    for tool in memcheck racecheck; do
        for kernels in native portable; do
            step "$tool, $kernels kernels"
            if [ $kernels = native ]; then names=(--kernel-name kns=forward) cases=$some; else names=() cases=$some,$codes; fi
            compute-sanitizer --tool $tool --error-exitcode 9 "${names[@]}" \
                "$flashtile" check --backend cuda --kernels $kernels --exact-memory --filter $cases > "$out/$tool-$kernels.txt" 2>&1 ||
                { tail -40 "$out/$tool-$kernels.txt"; exit 1; }
            grep -E "ERROR SUMMARY|RACECHECK SUMMARY|^cuda " "$out/$tool-$kernels.txt" | cut -c1-100
        done
    done
fi
