#!/bin/sh
# Records traces of all GPUs of this machine, one rank a GPU, each with the machine and the date beside it:
# traces/h200x8_pipelined, _reduce, _low_latency, _two_hop and _overlapped (calls back to back) and _late_rank
# (one rank begins each call late); or what the GPUs and their number are. Run behind
# `make gpu-check`, which builds.
#
#   traces/record_gpu.sh [pipelined] [reduce] [low_latency] [two_hop] [overlapped] [late_rank]     all of them where none is named
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

# describe DIRECTORY COMMAND: what the README of a capture says first.
describe() {
    cat > "$1/README.md" <<END
Made by \`traces/record_gpu.sh\` on $(date -u +%Y-%m-%d): $ranks $gpu of one host, driver $driver, $versions.

    $2

END
}

# back_to_back VARIANT OPTIONS: one run of the bundled pipeline.
back_to_back() {
    directory=traces/${name}_$1
    command="run moe --backend cuda --ranks $ranks --variant $* -o $directory"
    rm -rf "$directory"
    $python -m tracekern $command
    describe "$directory" "tracekern $command"
    cat >> "$directory/README.md" <<END
Calls back to back, behind a barrier each. \`tracekern open $directory\` shows a typical one.
END
}
few="--tokens 64 --hidden 7168 --experts 64 --topk 8 --routing uniform --even --blocks 32 --warps 8 --iterations 12"
pipelined() { back_to_back pipelined $few; }
reduce() { back_to_back reduce $few; }
low_latency() { back_to_back low_latency --tokens 1 --hidden 7168 --experts 256 --topk 8 --iterations 12; }
two_hop() {
    back_to_back two_hop --nodes 1 --channels 10 --tokens 128 --hidden 7168 --experts 256 --topk 8 --routing uniform --even \
        --iterations 3
}
overlapped() {
    back_to_back overlapped --option partitions=2 --expert int4_sparse --tokens 256 --hidden 7168 --intermediate 2048 --experts $((8 * ranks)) --topk 4 \
        --routing uniform --even --iterations 2
}

late_rank() {
    directory=traces/${name}_late_rank
    command="run moe --backend cuda --ranks $ranks --variant balanced --tokens 64 --hidden 7168 --experts 64 --topk 4 --routing uniform --even \
--blocks 16 --warps 8 --iterations 20 --late-rank 1 --late-us 300 -o $directory"
    rm -rf "$directory"
    $python -m tracekern $command
    describe "$directory" "tracekern $command"
    echo "The kernels of rank 1 begin 300 us late in each call." >> "$directory/README.md"
}

for which in ${*:-pipelined reduce low_latency two_hop overlapped late_rank}; do $which; done
