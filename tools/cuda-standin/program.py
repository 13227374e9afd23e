"""Makes C++ for the host of a native CUDA program.

    program.py PROGRAM.cu PROGRAM.cpp
"""

import re
import sys

# Functions with PTX: the headers define them for the host. Empty instructions, which hide a value from the compiler, work here too.
DEVICE_FUNCTION = re.compile(r"^(template <[^\n]*>\n)?DEVICE [^\n;]*\{", re.MULTILINE)
HIDES_A_VALUE = 'asm volatile("" : "+r"(x))'

TMA_COPY = re.compile(r'asm volatile\("cp\.async\.bulk\.tensor\.5d.*?"memory"\);', re.DOTALL)
TMA_BOX = "{column, (int)head, rows + (i32)row, end}"

DYNAMIC_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) u8 (\w+)\[\];")
KERNEL = re.compile(
    r'extern "C" __global__ void(?: __cluster_dims__\((\d+), 1, 1\))?(?: __launch_bounds__\([^\n]*?\))?\s+(\w+)\(const __grid_constant__ (\w+) '
)

WGMMA = "template <Dtype T, int N>\nstruct Wgmma;\n"
PRINTED_WGMMA = "template <>\nstruct Wgmma<"


def end_of_braces(source, at):
    """The index behind the brace that closes the one at `at`."""
    depth = 0
    for index in range(at, len(source)):
        depth += {"{": 1, "}": -1}.get(source[index], 0)
        if depth == 0:
            return index + 1
    raise ValueError("a brace is not closed")


def without_printed_products(source):
    """Without the instructions that the host printed for each number of columns."""
    while (at := source.find(PRINTED_WGMMA)) >= 0:
        end = end_of_braces(source, source.index("{", at))
        source = source[:at] + source[end + 1 :]
    return source.replace(WGMMA, '#include "wgmma.h"\n')


def tma_call(copy):
    """The function that does what a copy of a box does."""
    if ".global.shared::cta" in copy[0]:
        return f"standin_tma_store(from, {TMA_BOX}, map->words);"
    blocks = "standin_cluster" if "multicast" in copy[0] else "0"
    return f"standin_tma(to, barrier, {TMA_BOX}, map->words, {blocks});"


def without_ptx(source):
    kept, done = [], 0
    for match in DEVICE_FUNCTION.finditer(source):
        if match.start() < done:
            continue
        end = end_of_braces(source, match.end() - 1)
        function = source[match.start() : end]
        if re.search(r"\basm\b", function) and HIDES_A_VALUE not in function:
            kept.append(source[done : match.start()])
            done = end
    return "".join(kept) + source[done:]


def host_program(source):
    source = without_printed_products(source)
    source = TMA_COPY.sub(tma_call, source)
    source = without_ptx(source)
    source = DYNAMIC_SHARED.sub(r"u8* \1 = standin_shared;", source)
    # The project's types are declared; functions follow.
    types_end = source.index("\n", source.index("constexpr u32 ALL_LANES")) + 1
    source = f'#include "intrinsics.h"\n{source[:types_end]}#include "instructions.h"\n{source[types_end:]}'
    for cluster, name, params in KERNEL.findall(source):
        source += f'\nextern "C" void entry_{name}(void** arguments) {{ {name}(*(const {params}*)arguments[0]); }}\n'
        source += f'extern "C" {{ u32 cluster_of_{name} = {cluster or 1}; }}\n'
    return source


if __name__ == "__main__":
    with open(sys.argv[1]) as program:
        translated = host_program(program.read())
    with open(sys.argv[2], "w") as result:
        result.write(translated)
