#!/bin/sh
# Records traces/cpu_8_ranks again: the run of `make demo`, capture and trace, with the machine and the date beside them.
set -e
cd "$(dirname "$0")/.."
directory=traces/cpu_8_ranks
command="tracekern run moe --ranks 8 --variant balanced --tokens 64 --hidden 2048 --experts 64 --topk 6 --dtype bf16 \
--routing zipf --iterations 3 --seed 7 -o $directory"
rm -rf "$directory"
PATH="$PWD/.venv/bin:$PATH" sh -c "$command"
cat > "$directory/README.md" <<END
Made by \`traces/record_cpu.sh\` on $(date -u +%Y-%m-%d): $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores, CPU backend.

    $command

Open \`trace.pftrace.gz\` with \`tracekern open\`, or merge the capture again: \`tracekern export $directory -o again.pftrace.gz\`.
Eight processes share the cores here: the trace shows order and coverage, never durations of a GPU.
END
