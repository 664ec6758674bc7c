#!/bin/sh
# Records the captures of transfer engines again, with the machine and the date beside them: fabric_late_rank, two
# processes of which one submits late, and weights with weights_broadcast, six hosts in namespaces, which need root.
# Names as arguments record only these. Needs libfabric (docs/fabric.md), and no GPU.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

describe() { # directory, command, what there is to see
    cat > "$1/README.md" <<END
Made by \`traces/record_fabric.sh\` on $(date -u +%Y-%m-%d): $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores.

    $2

$3
END
}

for name in ${*:-fabric_late_rank weights}; do
    directory=traces/$name
    rm -rf "$directory"
    case $name in
    fabric_late_rank)
        command="run fabric --ranks 2 --provider tcp --domains 2 --pages 16 --page-kib 64 --iterations 12 --late-rank 1 \
--late-us 1000 -o $directory"
        $python -m tracekern $command
        describe "$directory" "tracekern $command" "\
Rank 1 submits 1 ms later than rank 0 in each iteration. Open \`trace.pftrace.gz\` with \`tracekern open\`, or ask who was
late: \`tracekern report $directory\`. [docs/fabric.md](../../docs/fabric.md#one-transfer-step-by-step) reads one transfer."
        ;;
    weights)
        command="benchmarks/weights.py --layers 4 --record $directory"
        rm -rf "${directory}_broadcast"
        $python $command
        for each in "$directory" "${directory}_broadcast"; do
            $python -m tracekern export "$each" -o "$each/trace.pftrace.gz"
        done
        describe "$directory" "python $command" "\
One version of weights, written by ranks 0 to 3 to ranks 4 and 5: six hosts in namespaces, each with a NIC of 400 Mbit/s. A
row a stage on each training rank: copy, prepare, write, barrier. Which ran side by side says \`tracekern report
$directory\`; [docs/fabric.md](../../docs/fabric.md#weights-for-rl) reads it."
        describe "${directory}_broadcast" "python $command" "\
The same version through rank 0, which gathers bf16 from ranks 1 to 3, prepares all of it and writes it whole to ranks 4
and 5. [docs/fabric.md](../../docs/fabric.md#weights-for-rl) puts it beside \`traces/weights\`."
        ;;
    *)
        echo "record_fabric.sh: nothing is called $name; there are fabric_late_rank and weights" >&2
        exit 2
        ;;
    esac
done
