#!/bin/sh
# Records a trace of all GPUs of this machine, one rank a GPU, twice: traces/h200x8 (three calls) and
# traces/h200x8_late_host (six, with the lanes of torch.profiler, and merged without alignment for contrast), or what
# the GPUs and their number are. Each with the machine and the date beside it. Run behind `make gpu-check`, which builds.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi -L > /dev/null 2>&1 || { echo "record_gpu.sh: nvidia-smi names no GPU; run it where some are" >&2; exit 2; }
ranks=$(nvidia-smi -L | wc -l)
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)
versions=$($python -c 'import torch; print(f"CUDA {torch.version.cuda}, torch {torch.__version__}")')
name=$(echo "$gpu" | sed 's/.* //' | tr 'A-Z' 'a-z')x$ranks

# record DIRECTORY OPTIONS: one run of the bundled pipeline, and what the README of its capture says first.
record() {
    directory=traces/$1
    shift
    command="run moe --backend cuda --ranks $ranks --variant balanced --tokens 32 --hidden 7168 --experts 64 --topk 4 \
--routing zipf --seed 7 --blocks 16 --warps 8 $* -o $directory"
    rm -rf "$directory"
    $python -m tracekern $command
    cat > "$directory/README.md" <<END
Made by \`traces/record_gpu.sh\` on $(date -u +%Y-%m-%d): $ranks $gpu of one host, driver $driver, $versions.

    tracekern $command

END
}

record "$name" --iterations 3
cat >> "$directory/README.md" <<END
Open \`trace.pftrace.gz\` with \`tracekern open\`, or merge the capture again: \`tracekern export $directory -o again.pftrace.gz\`.
The long \`wait_counts\` spans show launches that came late: each stage of each call is started from Python.
END

record "${name}_late_host" --iterations 6 --torch-profiler
$python -m tracekern export "$directory" --unaligned -o "$directory/unaligned.pftrace.gz"
cat >> "$directory/README.md" <<END
\`trace.pftrace.gz\` is the merged trace, \`unaligned.pftrace.gz\` the same with every GPU on its own clock, for contrast:

    tracekern export $directory --unaligned -o $directory/unaligned.pftrace.gz

[docs/walkthrough.md](../../docs/walkthrough.md) walks through such a capture.
END
