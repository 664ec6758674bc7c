// A kernel of your own in a torch extension, traced: the warps of a block square rows of a matrix, then wait for each
// other. Plain CUDA but for the lines that name TK_ or the recorder.
#include <cuda_runtime.h>
#include <tracekern.h>

#include <stdexcept>

#include "square.h"

using namespace tracekern;

// name, class, ends at, channel, fields at begin, fields at end
#define SQUARE_EVENTS(EVENT)                         \
    EVENT(square_row, work, issue, "", "row:32", "") \
    EVENT(wait_block, wait, completion, "", "", "")
TK_DEFINE_EVENTS(SquareEvent, SQUARE_EVENTS)

namespace {

template <class Rec>
__global__ void square_rows(float* matrix, uint32_t num_rows, uint32_t num_columns, typename Rec::Args trace) {
    Warp warp(LaunchSize{});
    Rec recorder(trace, warp);
    const uint32_t num_writers = warp.num_blocks * warp.num_warps;
    for (uint32_t row = warp.block * warp.num_warps + warp.warp; row < num_rows; row += num_writers) {
        TK_RANGE(recorder, SquareEvent::square_row, row);
        for (uint32_t column = threadIdx.x % 32; column < num_columns; column += 32) {
            float& value = matrix[size_t{row} * num_columns + column];
            value *= value;
        }
    }
    TK_WAIT(recorder, SquareEvent::wait_block);
    TK_END_AFTER_BARRIER(warp);  // a __syncthreads() that the span ends with
}

void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

}  // namespace

void launch_square(float* matrix, uint32_t num_rows, uint32_t num_columns, const SquareLaunch& launch) {
    const auto stream = reinterpret_cast<cudaStream_t>(launch.stream);
    const dim3 grid(launch.grid), threads(launch.warps * 32);
    if (launch.descriptor) {
        const Recorder<true>::Args trace{*reinterpret_cast<const LaunchDescriptor*>(launch.descriptor)};
        square_rows<Recorder<true>><<<grid, threads, 0, stream>>>(matrix, num_rows, num_columns, trace);
    } else {
        square_rows<Recorder<false>><<<grid, threads, 0, stream>>>(matrix, num_rows, num_columns, {});
    }
    check(cudaGetLastError(), "square_rows");
}

void load_square() {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, square_rows<Recorder<true>>), "square_rows, traced");
    check(cudaFuncGetAttributes(&attributes, square_rows<Recorder<false>>), "square_rows, untraced");
}

std::string square_events() {
    return describe_events<SquareEvent>();
}
