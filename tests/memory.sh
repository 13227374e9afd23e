#!/usr/bin/env bash
# Runs memory checkers on the kernels: valgrind's memcheck on a small part of the catalogue, the address sanitizer on all of it.
#
#   tests/memory.sh [--no-skip] [memcheck] [asan]
#
# Without names, both. A checker that cannot run here is skipped with the reason, or fails with --no-skip. The exit status is 0
# if nothing was found.
#
# Tensors lie in allocations of exactly their size (flashtile check --exact-memory). Before it judges the kernels, a checker
# must find one byte read past each kind of tensor (tests/overread.rs).
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."

allowed=1
checkers=()
for arg in "$@"; do
    case $arg in
        --no-skip) allowed= ;;
        memcheck | asan) checkers+=("$arg") ;;
        *) echo "memory.sh: expected --no-skip, memcheck or asan, not $arg" >&2; exit 2 ;;
    esac
done
[ ${#checkers[@]} -gt 0 ] || checkers=(memcheck asan)

skipped=()
step() { printf '\n== %s\n' "$*"; }
skip() { printf 'SKIPPED: %s\n' "$*"; skipped+=("$*"); }

# Two threads if there are two processors: keys are then split, and partial results go through the workspace.
threads=$(($(getconf _NPROCESSORS_ONLN) > 1 ? 2 : 1))

# Builds the program to check and the one that tests the checker; sets flashtile and overread to their paths.
build() { # options of cargo build
    local paths
    paths=$(cargo build --locked -p flashtile -p flashtile-cli --bin flashtile --test overread \
        --message-format=json-render-diagnostics "$@" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    flashtile=$(grep '/flashtile$' <<< "$paths")
    overread=$(grep '/overread-[0-9a-f]*$' <<< "$paths")
}

# Whether a checker accepts valid reads, and reports invalid ones at the right place.
prove() { # what the checker prints of a read past an allocation; the command that runs a program under it
    local found=$1 said wrong
    shift
    if ! said=$(FLASHTILE_READ='' "$@" "$overread" 2>&1); then
        printf '%s\nmemory.sh: reads inside tensors are found wrong\n' "$said"
        return 1
    fi
    for wrong in q k v out mask bytes slopes sinks lse -q -k -bytes -lse +q +k +bytes; do
        if said=$(FLASHTILE_READ=$wrong "$@" "$overread" 2>&1) || ! grep -q "$found" <<< "$said"; then
            printf '%s\nmemory.sh: a read outside %s is not found\n' "$said" "$wrong"
            return 1
        fi
    done
    echo "finds one byte read past or before a tensor, and a word across its end"
}

# Cases for memcheck, which is about forty times slower than a plain run, from each group of the catalogue: every feature, dtype and
# layout, and sizes next to the edges of registers, tiles and blocks.
representative=(
    # Dimensions: below, at and past a vector; odd ones, in the three dtypes; values of another dimension.
    head_dim_1_ head_dim_8_ head_dim_31_ head_dim_33_ head_dim_65_ value_dim_64_1 value_dim_33_257 value_dim_65_63
    # Groups and layouts; batches.
    mha_3_fused gqa_3_of_6 mqa_5_padded gqa_7_of_14_bshd batch_7
    # Numbers of keys and queries at the sizes of a block, a tile and a register tile, and beside them.
    keys_1 keys_15 keys_17 keys_63 keys_255 keys_257 keys_513 queries_1 queries_5 queries_7 queries_13 queries_23 queries_25
    # Causal and window visibility.
    causal_square causal_offset_negative causal_offset_past_all_keys causal_257_f16 causal_chunk_33_after_481_bf16
    causal_one_query gqa_7_causal causal_chunk_13_after window_both window_257_across_blocks window_misses_all_keys
    # Scores.
    scale_-0.3 softcap_0.5 alibi_causal sinks_softcap_alibi sinks_causal_no_keys alibi_far_away
    # Masks: each kind, broadcast and not, with rows at odd addresses and every kind of mask tile.
    mask_bool_broadcast_full mask_f32_broadcast_full mask_f16_broadcast_full mask_bf16_broadcast_full
    mask_bool_broadcast_b mask_f16_broadcast_hk mask_f32_broadcast_q mask_bool_blocks_h mask_bf16_hidden_rows_bh
    mask_bool_kv_lens mask_f16_causal_blocks mask_f32_decode mask_f16_odd_rows
    # Padded, packed and cached sequences, tree masks; empty problems.
    kv_lens_f32 kv_lens_bottom_right_f16 kv_lens_window_bf16 packed_uneven_causal packed_mask_bool_f32 packed_forty packed_none
    cached_steps_pages_of_7 cached_mixed_pages_of_24 cached_ring_of_pages_of_2 cached_ring_41 cached_window cached_d80x33
    cached_d3 cached_empty prefix_steps_300 prefix_nested_mask_bf16 prefix_tree_f16 tree_branches_verify_f16 tree_random_window tree_mask tree_single
    no_keys no_queries no_batch one_of_everything
    # Few rows and many keys: streams, splits, partial results.
    decode_1_group_1_of_2 decode_2_group_3_of_3 decode_5_group_7_of_7 decode_16_group_1_of_2 decode_1_group_16_of_16
    decode_window decode_batch decode_packed decode_mask_f16
    # The features of a model combined.
    like_minilm like_gpt_oss_f32
)

memcheck() {
    step "memcheck"
    if ! command -v valgrind > /dev/null; then
        skip "memcheck: valgrind is not installed"
        return
    fi
    build --release
    # Reading an aligned vector that partly lies past the end is an error too; by default the bytes only count as undefined.
    local run=(valgrind --quiet --error-exitcode=99 --partial-loads-ok=no --num-callers=16
        --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite)
    prove 'Invalid read of size' "${run[@]}"
    local isas=(portable) isa
    # Valgrind does not support AVX-512, and supports AVX2 only on processors that have it.
    if [ "$(grep -m1 '^flags' /proc/cpuinfo 2> /dev/null | grep -owE 'avx2|fma|f16c' | sort -u | wc -l)" = 3 ]; then
        isas+=(avx2)
    else
        skip "memcheck of avx2: the processor lacks AVX2, FMA or F16C"
    fi
    for isa in "${isas[@]}"; do
        "${run[@]}" "$flashtile" check --isa "$isa" --threads "$threads" --exact-memory \
            --filter "$(IFS=,; echo "${representative[*]}")" --seeds 0..12
    done
}

asan() {
    step "address sanitizer"
    local host lib
    host=$(rustc -vV | sed -n 's/^host: //p')
    lib=$(rustc --print sysroot)/lib/rustlib/$host/lib
    if ! ls "$lib"/librustc-*_rt.asan.* > /dev/null 2>&1; then
        skip "address sanitizer: the toolchain has no runtime of it for $host (in $lib)"
        return
    fi
    # The option is unstable; a release toolchain accepts it when told to behave like a nightly one.
    local target=${CARGO_TARGET_DIR:-target}/asan
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address ${RUSTFLAGS:-}" ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
    # With an explicit target, build scripts and macros are not instrumented. Assertions are enabled, also in the standard
    # library's unsafe functions.
    build --target "$host" --target-dir "$target"
    prove 'AddressSanitizer: heap-buffer-overflow' env
    "$flashtile" check --threads "$threads" --exact-memory --seeds 0..400
    # The unit tests emulate kernels for instruction sets that this machine may lack, between guard bands.
    cargo test --locked --target "$host" --target-dir "$target" -p flashtile-cpu --lib
}

for checker in "${checkers[@]}"; do "$checker"; done

step "result"
if [ ${#skipped[@]} -gt 0 ]; then
    printf 'skipped: %s\n' "${skipped[@]}"
    [ -n "$allowed" ] || exit 1
fi
echo "nothing found"
