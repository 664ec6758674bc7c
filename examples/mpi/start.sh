#!/bin/sh
# Starts a program on so many ranks, by mpirun where there is one: ./start.sh 2 ./ring_host --slow 1
[ $# -ge 2 ] || { echo "usage: $0 RANKS PROGRAM [ARGUMENTS...]" >&2; exit 2; }
ranks=$1
shift
export RING_RUN="ring-$(date +%s)-$$"
code=0
if command -v mpirun >/dev/null; then
    mpirun -n "$ranks" "$@" || code=$?
else
    pids=""
    rank=0
    while [ $rank -lt "$ranks" ]; do
        RANK=$rank WORLD_SIZE=$ranks "$@" &
        pids="$pids $!"
        rank=$((rank + 1))
    done
    for pid in $pids; do wait "$pid" || code=$?; done
fi
echo "write what was recorded: tracekern salvage $RING_RUN"
exit $code
