#!/bin/sh
# Records the captures of transfer engines again, with the machine and the date beside them: fabric_late_rank, two
# processes of which one submits late, kv_cache, a prefiller that writes to the pages of a decoder, and weights with
# weights_broadcast, six hosts in namespaces, which need root.
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

for name in ${*:-fabric_late_rank kv_cache weights}; do
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
    kv_cache)
        command="examples/kv_cache/main.py --provider tcp --requests 4 --layer-ms 2 -o $directory"
        $python $command
        # Ranks that only engines connect have no launcher, which would write the table of contents.
        $python - "$directory" <<'END'
import sys
from pathlib import Path

from tracekern.dump.reader import peek_metadata
from tracekern.segment.manifest import write_manifest

directory = Path(sys.argv[1])
write_manifest(directory, peek_metadata(directory / "rank_00000.tkdump")["run_id"])
END
        $python -m tracekern export "$directory" -o "$directory/trace.pftrace.gz"
        describe "$directory" "python $command" "\
Rank 0 is the decoder, rank 1 the prefiller: each \`layer\` is followed by a \`transfer\` of its 16 pages, the last one by
the tail, too. The decoder's \`wait_imm\` ends with the 97th write. \`tracekern report $directory\` says what was waited for."
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
        echo "record_fabric.sh: nothing is called $name; there are fabric_late_rank, kv_cache and weights" >&2
        exit 2
        ;;
    esac
done
