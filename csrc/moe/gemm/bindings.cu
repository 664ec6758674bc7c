// tracekern._cuda.families["gemm"]
#include <algorithm>

#include "moe/bind_cuda.hpp"
#include "moe/gemm/bind.hpp"
#include "platform/row_map.hpp"

namespace tracekern {

namespace {

struct GemmOnGpu {
    using Communicator = CudaCommunicator;

    // Blocks that are resident together share the work: no kernel here waits for another block.
    template <class Body>
    static GemmGrid grid(const GemmConfig& config, const GemmArgs& args) {
        const uint32_t num_warps = Body::kNumWarps;
        if (Body::kIsOneBlock) return {1, num_warps};
        const void* kernel = kernel_address<Gemm>(config, Body::kStage, BodyKind{});
        return {std::max(1u, resident_blocks(kernel, options<Body>(args, {1, num_warps}, 0))), num_warps};
    }

    template <class Body>
    static void run(const GemmConfig& config,
                    GemmArgs args,
                    GemmGrid grid,
                    TraceChoice trace,
                    uint64_t stream,
                    const Communicator*) {
        if constexpr (kCopiesBoxes<Body>) {
            if (args.num_rows == 0) return;
            using Product = typename Body::Product;
            args.x_map = make_row_map(Product::in(args), args.num_rows, Product::channels(args));
        }
        LaunchSize size{grid.num_blocks, grid.num_warps};
        const BodyKind kind{trace.is_traced(), trace.format(), Extent::any};
        TraceArgument argument(trace, kind.extent);
        launch_kernel(kernel_address<Gemm>(config, Body::kStage, kind),
                      options<Body>(args, grid, stream),
                      {argument.data(), &args, &size});
    }

private:
    template <class Body>
    static LaunchOptions options(const GemmArgs& args, GemmGrid grid, uint64_t stream) {
        LaunchOptions options{grid.num_blocks, grid.num_warps * kLanes};
        options.shared_bytes = Body::shared_bytes(args, grid.num_warps);
        options.stream = stream;
        return options;
    }
};

}  // namespace

void register_gemm(pybind11::module_& extension) {
    auto family = family_module<Gemm>(extension);
    bind_gemm_kernels<GemmOnGpu>(family);
    // (registers, bytes of stack and spills) of a thread. record_format: of the traced body; "" for the untraced one.
    family.def(
        "resources",
        [](const std::string& stage, const std::string& staging, const std::string& record_format, bool is_detailed) {
            const auto own = enum_named<GemmStage>("stage", stage, kGemmStageNames);
            const bool is_traced = !record_format.empty();
            const auto format = is_traced ? enum_named<RecordFormat>("record_format", record_format, kRecordFormatNames)
                                          : RecordFormat::span;
            const auto found = kernel_resources(
                kernel_address<Gemm>(gemm_config(staging, is_detailed), own, BodyKind{is_traced, format}));
            return pybind11::make_tuple(found.registers, found.local_bytes);
        },
        pybind11::arg("stage"),
        pybind11::arg("staging"),
        pybind11::arg("record_format") = "",
        pybind11::arg("is_detailed") = false);
}

}  // namespace tracekern
