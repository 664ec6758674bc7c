// A CUDA kernel of your own in a torch extension, traced: the warps of a block square rows of a matrix, then wait for
// each other. Tracing takes the table of events, the lines that begin with TK_, and the choice of a body at the launch.
#include <cuda_runtime.h>
#include <tracekern.h>

#include <stdexcept>

#include "square.h"

using namespace tracekern::api;

// name, class, ends at, channel, fields at begin, fields at end
#define SQUARE_EVENTS(EVENT)                         \
    EVENT(square_row, work, issue, "", "row:32", "") \
    EVENT(wait_block, wait, completion, "", "", "")
TK_DEFINE_EVENTS(SquareEvent, SQUARE_EVENTS)

namespace {

template <class Trace>
__global__ void square_rows(float* matrix, uint32_t num_rows, uint32_t num_columns, Trace trace) {
    TK_RECORDER(trace);
    const uint32_t warps_per_block = blockDim.x / 32;
    const uint32_t first = blockIdx.x * warps_per_block + threadIdx.x / 32;
    for (uint32_t row = first; row < num_rows; row += gridDim.x * warps_per_block) {
        TK_RANGE(recorder, SquareEvent::square_row, row);
        for (uint32_t column = threadIdx.x % 32; column < num_columns; column += 32) {
            float& value = matrix[size_t{row} * num_columns + column];
            value *= value;
        }
    }
    TK_WAIT(recorder, SquareEvent::wait_block);
    TK_END_AFTER_BARRIER(current_warp());  // a __syncthreads() that the span ends with
}

void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

}  // namespace

void launch_square(float* matrix, uint32_t num_rows, uint32_t num_columns, const SquareLaunch& launch) {
    const auto stream = reinterpret_cast<cudaStream_t>(launch.stream);
    with_recorder(launch.descriptor, [&](auto trace) {
        square_rows<<<launch.grid, launch.warps * 32, 0, stream>>>(matrix, num_rows, num_columns, trace);
    });
    check(cudaGetLastError(), "square_rows");
}

void load_square() {
    for_each_recorder([](auto trace) {
        cudaFuncAttributes attributes;
        check(cudaFuncGetAttributes(&attributes, square_rows<decltype(trace)>), "square_rows");
    });
}

std::string square_events() {
    return describe_events<SquareEvent>();
}
