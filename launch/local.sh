#!/bin/sh
# All GPUs of this machine, or one CPU rank. Usage: launch/local.sh RECIPE [--a.b=c ...]; NPROC sets the number of ranks.
exec torchrun --standalone --nproc-per-node "${NPROC:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' | sed 's/^0$/1/')}" \
    -m spmd_rl run "$@"
