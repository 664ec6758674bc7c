"""Builds the extension, runs its kernel from two streams at once under a capture, and leaves that in my-capture/.

python examples/torch_extension/trace_it.py && tracekern export my-capture -o my-capture/trace.pftrace.gz
"""

import subprocess
import sys
from pathlib import Path

import torch

import tracekern

if not torch.cuda.is_available():
    print("this example needs a GPU, and nvcc to build it; examples/my_kernel runs without", file=sys.stderr)
    sys.exit(2)
HERE = Path(__file__).resolve().parent
print("building square.cu, some minutes")
subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=HERE, check=True)

sys.path.insert(0, str(HERE))
import square_extension  # noqa: E402 - built just now

STEPS = 10
streams = [torch.cuda.Stream() for _ in range(2)]
matrices = [torch.full((1024, 8192), -1.0, device="cuda") for _ in streams]
torch.cuda.synchronize()

events = square_extension.events()
with tracekern.capture("my-capture", device="cuda", preload=[square_extension.load]) as capture:
    for _ in range(STEPS):
        for stream, matrix in zip(streams, matrices, strict=True):
            launch = capture.launch("square", grid=8, warps=4, stream=stream.cuda_stream, events=events)
            square_extension.square(matrix, *launch)
    torch.cuda.synchronize()

assert all(bool((matrix == 1).all()) for matrix in matrices)
print(f"{STEPS} launches of square on each of {len(streams)} streams are in my-capture/")
