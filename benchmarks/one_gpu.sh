#!/bin/sh
# A flexcp command on ranks that share one GPU, for correctness rather than speed:
#   torchrun --nproc-per-node 4 --no-python benchmarks/one_gpu.sh bench step --lengths web:32768
# NCCL takes several ranks on a GPU when each has a host id of its own; messages then go through sockets.
export NCCL_HOSTID="rank$RANK" NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
exec python3 -m flexcp "$@"
