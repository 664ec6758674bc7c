// A kernel of your own, traced: the warps of a block square rows of a matrix, then wait for each other.
//
// The two events, the three lines that record them and the choice at the launch are all that tracing takes.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <tracekern.h>

#include <platform/cpu_executor.hpp>

namespace py = pybind11;
using namespace tracekern;

// name, class, ends at, channel, fields at begin, fields at end
#define MY_EVENTS(EVENT)                                  \
    EVENT(square_row, work, completion, "", "row:32", "") \
    EVENT(wait_block, wait, completion, "", "", "")
TK_DEFINE_EVENTS(MyEvent, MY_EVENTS)

struct SquareArgs {
    float* matrix;  // [num_rows, num_columns]
    uint32_t num_rows;
    uint32_t num_columns;
};

template <class Rec>
TK_DEVICE void square_rows(Warp& warp, const SquareArgs& args, typename Rec::Args trace) {
    Rec recorder(trace, warp);
    const uint32_t num_writers = warp.num_blocks * warp.num_warps;
    for (uint32_t row = warp.block * warp.num_warps + warp.warp; row < args.num_rows; row += num_writers) {
        TK_RANGE(recorder, MyEvent::square_row, row);
        float* values = args.matrix + size_t{row} * args.num_columns;
        warp.strided(args.num_columns, [&](uint32_t column) { values[column] *= values[column]; });
    }
    TK_WAIT(recorder, MyEvent::wait_block);
    TK_END_AFTER_BARRIER(warp);  // a warp.block_sync() that the span ends with
}

// descriptor, grid, warps: of capture.launch(...).
void square(py::array_t<float, py::array::c_style> matrix, uint64_t descriptor, uint32_t grid, uint32_t warps) {
    const SquareArgs args{
        matrix.mutable_data(), static_cast<uint32_t>(matrix.shape(0)), static_cast<uint32_t>(matrix.shape(1))};
    const SimulatedClock clock;  // the host's own
    const CpuLaunch size{.num_blocks = grid, .warps_per_block = warps, .clock = &clock};
    with_recorder(descriptor, [&]<class Rec>(auto trace) {
        launch_cpu(size, [&](Warp& warp) { square_rows<Rec>(warp, args, trace); });
    });
}

PYBIND11_MODULE(my_kernel, module) {
    // noconvert: of a matrix that is not contiguous a copy would be squared.
    module.def(
        "square", &square, py::arg("matrix").noconvert(), py::arg("descriptor"), py::arg("grid"), py::arg("warps"));
    module.def("events", &describe_events<MyEvent>);
}
