#!/usr/bin/env bash
# Runs a command with the stand-in in the place of NVIDIA's driver and compiler.
#
#   tools/cuda-standin/run.sh COMMAND [ARGUMENT...]
#
# CUDA_STANDIN_MULTIPROCESSORS is the number of multiprocessors that the device claims (default: 4).
set -euo pipefail
here=$(dirname "$(realpath "$0")")
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
g++ -std=c++17 -O2 -fPIC -shared -o "$build/libcuda.so.1" "$here/driver.cpp" -ldl
ln -s libcuda.so.1 "$build/libcuda.so"
ln -s libcuda.so.1 "$build/libnvrtc.so.13"
mkdir "$build/cache"
export CUDA_STANDIN_FOLDER=$here CUDA_STANDIN_BUILD=$build
export FLASHTILE_NVRTC=$build/libnvrtc.so.13 FLASHTILE_CACHE_DIR=$build/cache
LD_LIBRARY_PATH=$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$@"
