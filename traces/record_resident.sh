#!/bin/sh
# Records traces/h200_resident and traces/h100_low_latency, or what the GPU is: eight ranks resident on one GPU, rank 3
# of which begins each call 300 us late, with the machine and the date beside it. Run behind `make gpu-check`, which
# builds.
#
#   traces/record_resident.sh [DIRECTORY]     also records the first run in turns, into DIRECTORY
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi -L > /dev/null 2>&1 || { echo "record_resident.sh: nvidia-smi names no GPU; run it where one is" >&2; exit 2; }
gpu=$(nvidia-smi --id=0 --query-gpu=name --format=csv,noheader)
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader)
versions=$($python -c 'import torch; print(f"CUDA {torch.version.cuda}, torch {torch.__version__}")')
card=$(echo "$gpu" | sed -E 's/^NVIDIA ([A-Z0-9]+).*/\1/' | tr 'A-Z' 'a-z')
late="--late-rank 3 --late-us 300 --backend cuda"
balanced="run moe --variant balanced --ranks 8 --tokens 32 --hidden 7168 --experts 64 --topk 4 --even --routing uniform \
--seed 7 --blocks 8 --warps 8 --iterations 4 $late"
low_latency="run moe --variant low_latency --ranks 8 --tokens 8 --hidden 2048 --experts 32 --topk 6 --iterations 3 $late"
export CUDA_VISIBLE_DEVICES=0

record() { # DIRECTORY COMMAND
    rm -rf "$1"
    $python -m tracekern $2 -o "$1"
    cat > "$1/README.md" <<END
Made by \`traces/record_resident.sh\` on $(date -u +%Y-%m-%d): one $gpu, driver $driver, $versions.

    tracekern $2 -o $1

Eight ranks are resident on the GPU side by side, and rank 3 begins each call 300 us later than the others. Open
\`trace.pftrace.gz\` with \`tracekern open\`, or ask who was late: \`tracekern report $1\`.
The ranks share one GPU and one clock: order and causes hold, and durations are those of an eighth of a GPU without links.
END
}

record "traces/${card}_resident" "$balanced"
record "traces/${card}_low_latency" "$low_latency"
[ -z "$1" ] || $python -m tracekern $balanced --torch-profiler -o "$1"
