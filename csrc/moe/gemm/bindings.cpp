// The extension module tracekern._gemm
#include <algorithm>

#include "apis/built_from.hpp"
#include "comm/communicator_cpu.hpp"
#include "moe/gemm/bind.hpp"

namespace tracekern {

namespace {

// A few blocks share the tiles, so that tests see blocks with several tiles and with none.
struct GemmOnCpu {
    using Communicator = CpuCommunicator;

    template <class Body>
    static GemmGrid grid(const GemmConfig&, const GemmArgs&) {
        return {Body::kIsOneBlock ? 1u : 3u,
                kNeedsAllWarps<Body> ? Body::kNumWarps : std::min(Body::kNumWarps, GemmTile::kWarps)};
    }

    // On the clock of the rank, where there is one.
    template <class Body>
    static void run(
        const GemmConfig&, GemmArgs args, GemmGrid grid, TraceChoice trace, uint64_t, const Communicator* comm) {
        if constexpr (kCopiesBoxes<Body>) {
            using Product = typename Body::Product;
            args.x_map = {Product::in(args), args.num_rows, Product::channels(args)};
        }
        const CpuLaunch launch{grid.num_blocks, grid.num_warps, Body::shared_bytes(args, grid.num_warps)};
        with_recorder(trace, [&]<class Rec>(typename Rec::Args trace_args) {
            const auto kernel = [&](Warp& warp) { Body::template run<Rec>(warp, args, trace_args); };
            if (comm) {
                comm->launch(launch, kernel);
            } else {
                launch_cpu(launch, kernel);
            }
        });
    }
};

}  // namespace
}  // namespace tracekern

PYBIND11_MODULE(_gemm, family) {
    tracekern::require_same_core();
    tracekern::bind_gemm_facts(family);
    tracekern::bind_gemm_kernels<tracekern::GemmOnCpu>(family);
}
