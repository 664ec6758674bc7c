#!/bin/sh
# Records traces/h100_int4_pinned and traces/h100_int4_direct, or what the GPU is: K2 of int4 experts with the steps of
# one tile, once for each way of staging, with the machine and the date beside it; and draws docs/int4_steps.svg of them.
# And traces/h100_int4_ring: a call of one rank whose experts are staged by rings. Run behind `make gpu-check`, which
# builds.
#
#   traces/record_int4.sh [contract] [ring]     both where none is named
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi -L > /dev/null 2>&1 || { echo "record_int4.sh: nvidia-smi names no GPU; run it where one is" >&2; exit 2; }
gpu=$(nvidia-smi --id=0 --query-gpu=name --format=csv,noheader)
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader)
versions=$($python -c 'import torch; print(f"CUDA {torch.version.cuda}, torch {torch.__version__}")')
card=$(echo "$gpu" | sed -E 's/^NVIDIA ([A-Z0-9]+).*/\1/' | tr 'A-Z' 'a-z')
export CUDA_VISIBLE_DEVICES=0 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

contract() {
    pinned=traces/${card}_int4_pinned direct=traces/${card}_int4_direct
    rm -rf "$pinned" "$direct"
    command="benchmarks/int4_timeline.py --record cuda $pinned $direct -o docs/int4_steps.svg"
    $python $command
    for directory in "$pinned" "$direct"; do
        $python -m tracekern export "$directory" -o "$directory/trace.pftrace.gz"
        cat > "$directory/README.md" <<END
Made by \`traces/record_int4.sh\` on $(date -u +%Y-%m-%d): one $gpu, driver $driver, $versions.

    python $command

K2 of 32 int4 experts with 8 tokens each, hidden 7168, intermediate 2048. Block 0 alone is on record, and its first tile step
by step, in cycles of the core clock. [docs/int4_trace.md](../../docs/int4_trace.md) reads it. Ask how much of staging
hides: \`tracekern report $directory -o report.html\`.
END
    done
}

ring() {
    directory=traces/${card}_int4_ring
    command="run moe --backend cuda --ranks 1 --variant reduce --expert int4_sparse --tokens 32 --hidden 7168 --intermediate 2048 --experts 16 --topk 8 --routing uniform --even --detail 16 --clock cycles --iterations 1 -o $directory"
    rm -rf "$directory"
    $python -m tracekern $command
    cat > "$directory/README.md" <<END
Made by \`traces/record_int4.sh\` on $(date -u +%Y-%m-%d): one $gpu, driver $driver, $versions.

    tracekern $command

A call of one rank whose 16 int4 experts have some 16 tokens each. Every 16th tile of K2 and K4 is on record stage by stage, in cycles of the
core clock. [docs/int4_trace.md](../../docs/int4_trace.md#a-ring-on-record) reads it. Ask what limits the ring: \`tracekern report $directory -o report.html\`.
END
}

for which in ${*:-contract ring}; do $which; done
