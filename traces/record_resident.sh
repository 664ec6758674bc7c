#!/bin/sh
# Records traces/h200_resident, or what the GPU is: eight ranks resident on one GPU, rank 3 of which begins each call
# 300 us late, with the machine and the date beside it. Run behind `make gpu-check`, which builds.
#
#   traces/record_resident.sh [DIRECTORY]     also records the same run in turns, into DIRECTORY
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi -L > /dev/null 2>&1 || { echo "record_resident.sh: nvidia-smi names no GPU; run it where one is" >&2; exit 2; }
gpu=$(nvidia-smi --id=0 --query-gpu=name --format=csv,noheader)
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader)
versions=$($python -c 'import torch; print(f"CUDA {torch.version.cuda}, torch {torch.__version__}")')
name=$(echo "$gpu" | sed -E 's/^NVIDIA ([A-Z0-9]+).*/\1/' | tr 'A-Z' 'a-z')_resident
directory=traces/$name
command="run moe --backend cuda --ranks 8 --variant balanced --tokens 32 --hidden 7168 --experts 64 --topk 4 --even \
--routing uniform --seed 7 --blocks 8 --warps 8 --iterations 4 --late-rank 3 --late-us 300"
export CUDA_VISIBLE_DEVICES=0
rm -rf "$directory"
$python -m tracekern $command -o "$directory"
cat > "$directory/README.md" <<END
Made by \`traces/record_resident.sh\` on $(date -u +%Y-%m-%d): one $gpu, driver $driver, $versions.

    tracekern $command -o $directory

Eight ranks are resident on the GPU side by side, and rank 3 begins each call 300 us later than the others. Open
\`trace.pftrace.gz\` with \`tracekern open\`, or ask who was late: \`tracekern report $directory\`.
The ranks share one GPU and one clock: order and causes hold, and durations are those of an eighth of a GPU without links.
END
[ -z "$1" ] || $python -m tracekern $command --torch-profiler -o "$1"
