#!/bin/sh
# Records traces/h200_resident, h200_low_latency, h200_two_hop and h200_groups, or what the GPU is, and traces/two_hosts:
# eight ranks resident on one GPU, of which one, or its proxy, is late in each call, with the machine and the date
# beside it. Run behind `make gpu-check`, which builds.
#
#   traces/record_resident.sh [resident] [low_latency] [two_hop] [groups] [two_hosts]     all where none is named
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi -L > /dev/null 2>&1 || { echo "record_resident.sh: nvidia-smi names no GPU; run it where one is" >&2; exit 2; }
gpu=$(nvidia-smi --id=0 --query-gpu=name --format=csv,noheader)
driver=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader)
versions=$($python -c 'import torch; print(f"CUDA {torch.version.cuda}, torch {torch.__version__}")')
card=$(echo "$gpu" | sed -E 's/^NVIDIA ([A-Z0-9]+).*/\1/' | tr 'A-Z' 'a-z')
late="--late-rank 3 --late-us 300 --backend cuda"
balanced_run="run moe --variant balanced --ranks 8 --tokens 32 --hidden 7168 --experts 64 --topk 4 --even --routing uniform \
--seed 7 --blocks 8 --warps 8 --iterations 4 $late"
low_latency_run="run moe --variant low_latency --ranks 8 --tokens 8 --hidden 2048 --experts 32 --topk 6 --iterations 3 $late"
two_hop_run="run moe --variant two_hop --nodes 2 --ranks 8 --tokens 32 --hidden 7168 --experts 64 --topk 8 --even \
--routing uniform --channels 2 --nvl-send 2 --nvl-recv 8 --rdma-send 2 --rdma-recv 8 --iterations 3 --late-rank 5 \
--late-us 300 --backend cuda"
export CUDA_VISIBLE_DEVICES=0

record() { # NAME COMMAND WHO_IS_LATE
    directory=traces/${card}_$1
    rm -rf "$directory"
    $python -m tracekern $2 -o "$directory"
    describe "$directory" "tracekern $2 -o $directory" "$3"
}

describe() { # DIRECTORY COMMAND WHO_IS_LATE
    directory=$1
    cat > "$directory/README.md" <<END
Made by \`traces/record_resident.sh\` on $(date -u +%Y-%m-%d): one $gpu, driver $driver, $versions.

    $2

Eight ranks are resident on the GPU side by side, and $3. Open
\`trace.pftrace.gz\` with \`tracekern open\`, or ask what that costs: \`tracekern report $directory\`.
The ranks share one GPU and one clock: order and causes hold, and durations are those of an eighth of a GPU without links.
END
}

begins_late="rank 3 begins each call 300 us later than the others"
resident() { record resident "$balanced_run" "$begins_late"; }
low_latency() { record low_latency "$low_latency_run" "$begins_late"; }
two_hop() { record two_hop "$two_hop_run" "rank 5 begins each dispatch 300 us late"; }

groups() {
    directory=traces/${card}_groups
    rm -rf "$directory"
    program="examples/expert_groups/main.py --backend cuda --resident 8 --calls 10 --late-rank 5 --late-us 5000"
    PYTHONPATH=$PWD:$PYTHONPATH $python $program -o "$directory"
    $python -m tracekern merge "$directory" -o "$directory/trace.pftrace.gz"
    late="ranks 0, 2, 4 and 6 are one expert group, the others another one; rank 5 begins each call 5 ms late"
    describe "$directory" "python $program -o $directory" "$late"
}

two_hosts() {
    directory=traces/two_hosts
    rm -rf "$directory"
    command="run moe --variant low_latency --transport fabric --nodes 2 --ranks 8 --tokens 8 --hidden 2048 --experts 32 \
--topk 4 --iterations 20 --late-proxy 5 --late-us 2000 --backend cuda -o $directory"
    $python -m tracekern $command
    describe "$directory" "tracekern $command" "ranks 4 to 7 are another host; the proxy of rank 5 pauses for 2 ms before each turn"
}

for which in ${*:-resident low_latency two_hop groups two_hosts}; do $which; done
