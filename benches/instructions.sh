#!/usr/bin/env bash
# Counts the instructions of attention calls, and prints a markdown table of instructions per visible pair.
#
#   benches/instructions.sh [ISA] [TEXT]
#
# ISA is avx2 or portable, default both; TEXT selects cases whose name contains it. The last line of the output says which
# compiler built the program. Counts do not depend on the machine's load, so that a difference of a percent between two
# commits is real; but they are not times. Needs valgrind, which runs no AVX-512.
#
# EXACT=1 prints only the counts of instructions, one case per line, to be compared with diff.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
isa=${1:-} text=${2:-}
command -v valgrind > /dev/null || { echo "instructions.sh: valgrind is not installed" >&2; exit 1; }

bench=$(cargo bench --locked --no-run --bench instructions --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Without the caller's environment, whose size would move the stack.
counted() { # instruction set, case
    env -i PATH="$PATH" valgrind --quiet --tool=callgrind --callgrind-out-file="$out/profile" \
        --toggle-collect='*counted_attention_call*' "$bench" "$1" "$2" >&2
    sed -n 's/^summary: //p' "$out/profile"
}

"$bench" | grep -E "^${isa:-[a-z0-9]+} [a-z0-9_]*$text" > "$out/cases" ||
    { echo "instructions.sh: no case is ${isa:-any} $text" >&2; exit 1; }
while read -r set name pairs; do
    echo "$set $name $pairs $(counted "$set" "$name")"
done < "$out/cases" > "$out/counts"

if [ -n "${EXACT:-}" ]; then
    awk '{ print $1, $2, $4 }' "$out/counts"
    exit
fi
# One row per case, one column per instruction set.
awk '
    !($1 in column) { column[$1] = 1; isas[++n] = $1 }
    !($2 in row) { row[$2] = 1; names[++m] = $2 }
    { count[$1, $2] = $4; pairs[$2] = $3 }
    END {
        head = "| case | visible pairs |"; rule = "|---|---|"
        for (i = 1; i <= n; i++) { head = head " " isas[i] ": instructions | a pair |"; rule = rule "---|---|" }
        print head; print rule
        for (j = 1; j <= m; j++) {
            name = names[j]
            line = sprintf("| `%s` | %d |", name, pairs[name])
            for (i = 1; i <= n; i++) {
                c = count[isas[i], name]
                line = line sprintf(" %.1f M | %.2f |", c / 1e6, c / pairs[name])
            }
            print line
        }
    }' "$out/counts"
echo
echo "Counted at $(git describe --always --dirty 2> /dev/null || echo "no commit"), $(rustc --version)."
