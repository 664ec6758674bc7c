#!/bin/sh
# Records traces/fabric_late_rank: two processes of this host that write pages to each other through two domains each,
# one of which submits late, with the machine and the date beside it. Needs libfabric (docs/fabric.md), and no GPU.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
directory=traces/fabric_late_rank
command="run fabric --ranks 2 --provider tcp --domains 2 --pages 16 --page-kib 64 --iterations 12 --late-rank 1 \
--late-us 1000 -o $directory"
rm -rf "$directory"
$python -m tracekern $command
cat > "$directory/README.md" <<END
Made by \`traces/record_fabric.sh\` on $(date -u +%Y-%m-%d): $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores.

    tracekern $command

Rank 1 submits 1 ms later than rank 0 in each iteration. Open \`trace.pftrace.gz\` with \`tracekern open\`, or ask who was
late: \`tracekern report $directory\`. [docs/fabric.md](../../docs/fabric.md#one-transfer-step-by-step) reads one transfer.
END
