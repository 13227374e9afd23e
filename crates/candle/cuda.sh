#!/usr/bin/env bash
# Brings what candle needs to build its CUDA kernels, and runs a command with it. No GPU is needed to build.
#
#   crates/candle/cuda.sh FOLDER COMMAND...
#   crates/candle/cuda.sh target/cuda cargo test --release --features cuda --test cuda --no-run
#
# FOLDER is made unless it is there: NVIDIA's compiler and libraries of CUDA 13.0 from their Python wheels, for x86-64 Linux, and a
# stand-in for the driver's library, which programs link to; at run time the loader finds the driver itself. The command runs in
# crates/candle, with CUDA_COMPUTE_CAP=90 unless the environment names another capability. Wants gcc and python3.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '4,5s/^# *//p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(realpath "$1")
shift
cd "$(dirname "$(realpath "$0")")"

if [ ! -e "$folder/complete" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' \
        'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-nvrtc==13.0.*' \
        'nvidia-cublas==13.0.*' 'nvidia-curand==10.4.0.*'
    toolkit=$(echo "$folder"/venv/lib/python3*/site-packages/nvidia/cu13)
    ln -sfn "$toolkit" "$folder/toolkit"
    ln -sfn lib "$toolkit/lib64"
    # Linkers look for names without versions.
    for library in "$toolkit"/lib/*.so.*; do
        ln -sf "$(basename "$library")" "${library%%.so.*}.so"
    done
    # Every function of the driver's header, each of which says CUDA_ERROR_STUB_LIBRARY.
    mkdir -p "$toolkit/lib/stubs"
    grep -oh '\bcu[A-Z][A-Za-z0-9_]*' "$toolkit/include/cuda.h" | sort -u |
        sed 's/.*/int &(void) { return 34; }/' >"$folder/driver.c"
    gcc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" "$folder/driver.c"
    touch "$folder/complete"
fi

export CUDA_HOME=$folder/toolkit CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
export PATH=$CUDA_HOME/bin:$PATH
exec "$@"
