#!/usr/bin/env bash
# Runs a command as a careful user of PyTorch on CPUs would; only for comparisons, never in tests:
#   tests/bench/pytorch/tuned.sh COMMAND...
# OpenBLAS picks its kernels by itself; memory stays in the process, on huge pages where the kernel offers them (each of
# these is worth more than a factor where page faults are slow); OpenMP threads spin between parallel regions.
set -euo pipefail
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE OPENBLAS_NUM_THREADS MKL_NUM_THREADS ATEN_CPU_CAPABILITY
keep=17179869184
GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=$keep:glibc.malloc.trim_threshold=$keep
export GLIBC_TUNABLES=$GLIBC_TUNABLES:glibc.malloc.top_pad=268435456
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-active} GLOO_SOCKET_IFNAME=lo
exec "$@"
