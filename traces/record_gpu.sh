#!/bin/sh
# Records traces of all GPUs of this machine, one rank a GPU: traces/h200x8 (three calls), traces/h200x8_late_host (six,
# with the lanes of torch.profiler, and merged without alignment for contrast), and traces/h200x8_pipelined and
# traces/h200x8_low_latency, whose last rank begins each call 300 us late; or what the GPUs and their number are. Each
# with the machine and the date beside it. Run behind `make gpu-check`, which builds.
#
#   traces/record_gpu.sh [plain] [late_host] [pipelined] [low_latency]     all of them where none is named
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi -L > /dev/null 2>&1 || { echo "record_gpu.sh: nvidia-smi names no GPU; run it where some are" >&2; exit 2; }
ranks=$(nvidia-smi -L | wc -l)
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
versions=$($python -c 'import torch; print(f"CUDA {torch.version.cuda}, torch {torch.__version__}")')
card=$(echo "$gpu" | sed -E 's/^NVIDIA ([A-Z0-9]+).*/\1/' | tr 'A-Z' 'a-z')
name=${card}x$ranks

# record DIRECTORY OPTIONS: one run of the bundled pipeline, and what the README of its capture says first.
record() {
    directory=traces/$1
    shift
    command="run moe --backend cuda --ranks $ranks $* -o $directory"
    rm -rf "$directory"
    $python -m tracekern $command
    cat > "$directory/README.md" <<END
Made by \`traces/record_gpu.sh\` on $(date -u +%Y-%m-%d): $ranks $gpu of one host, driver $driver, $versions.

    tracekern $command

END
}

balanced="--variant balanced --tokens 32 --hidden 7168 --experts 64 --topk 4 --routing zipf --seed 7 --blocks 16 --warps 8"
late="--late-rank $((ranks - 1)) --late-us 300"

plain() {
    record "$name" $balanced --iterations 3
    cat >> "$directory/README.md" <<END
Open \`trace.pftrace.gz\` with \`tracekern open\`, or merge the capture again: \`tracekern export $directory -o again.pftrace.gz\`.
The long \`wait_counts\` spans show launches that came late: each stage of each call is started from Python.
END
}

late_host() {
    record "${name}_late_host" $balanced --iterations 6 --torch-profiler
    $python -m tracekern export "$directory" --unaligned -o "$directory/unaligned.pftrace.gz"
    cat >> "$directory/README.md" <<END
\`trace.pftrace.gz\` is the merged trace, \`unaligned.pftrace.gz\` the same with every GPU on its own clock, for contrast:

    tracekern export $directory --unaligned -o $directory/unaligned.pftrace.gz

[docs/walkthrough.md](../../docs/walkthrough.md) walks through such a capture.
END
}

# late_rank VARIANT OPTIONS
late_rank() {
    record "${name}_$1" --variant $* $late
    cat >> "$directory/README.md" <<END
Rank $((ranks - 1)) begins each call 300 us later than the others. Ask who was late: \`tracekern report $directory\`.
END
}
pipelined() { late_rank pipelined --tokens 32 --hidden 7168 --experts 64 --topk 4 --blocks 16 --warps 8 --iterations 3; }
low_latency() { late_rank low_latency --tokens 8 --hidden 7168 --experts 64 --topk 8 --blocks 16 --iterations 3; }

for which in ${*:-plain late_host pipelined low_latency}; do $which; done
