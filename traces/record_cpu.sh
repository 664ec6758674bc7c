#!/bin/sh
# Records the captures of CPU ranks again, with the machine and the date beside them: cpu_8_ranks, the run of `make demo`,
# and cpu_two_hop. Names as arguments record only these.
set -e
cd "$(dirname "$0")/.."

record() { # name, options of `tracekern run moe`, what there is to see
    directory=traces/$1
    command="tracekern run moe --ranks 8 $2 -o $directory"
    rm -rf "$directory"
    PATH="$PWD/.venv/bin:$PATH" sh -c "$command"
    cat > "$directory/README.md" <<END
Made by \`traces/record_cpu.sh\` on $(date -u +%Y-%m-%d): $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores, CPU backend.

    $command

$3
Open \`trace.pftrace.gz\` with \`tracekern open\`, or merge the capture again: \`tracekern export $directory -o again.pftrace.gz\`.
Eight processes share the cores here: the trace shows order and coverage, never durations of a GPU.
END
}

for name in ${*:-cpu_8_ranks cpu_two_hop}; do
    case $name in
    cpu_8_ranks)
        record cpu_8_ranks "--variant balanced --tokens 64 --hidden 2048 --experts 64 --topk 6 --dtype bf16 \
--routing zipf --iterations 3 --seed 7" "Dispatch, experts and combine, straight from rank to rank."
        ;;
    cpu_two_hop)
        record cpu_two_hop "--variant two_hop --nodes 2 --tokens 24 --hidden 2048 --experts 64 --topk 6 --dtype bf16 \
--routing zipf --even --channels 1 --nvl-send 2 --nvl-recv 8 --rdma-send 2 --rdma-recv 8 --iterations 2 --seed 7 \
--late-rank 5 --late-us 20000" "Two nodes of four ranks, there and back, and rank 5 begins each call 20 ms late."
        ;;
    *)
        echo "got $name; want cpu_8_ranks or cpu_two_hop" >&2
        exit 2
        ;;
    esac
done
