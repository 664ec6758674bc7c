// The entry point of every kernel of every family on a GPU: a body and a recorder. A family's kernels.cu makes its own
// with TK_FAMILY_KERNELS(Family).
#pragma once

#include "comm/mutation.h"
#include "platform/device.h"
#include "trace/trace_choice.h"
#ifdef TK_PLANTED_FAULTS
    #include "platform/gpu_host.hpp"
#endif

namespace tracekern {

// Blocks that an SM is to hold at once: 1, or what a body asks for.
template <class Body>
constexpr uint32_t min_blocks() {
    if constexpr (requires { Body::kMinBlocks; }) {
        return Body::kMinBlocks;
    } else {
        return 1;
    }
}

// The trace comes first: behind 800 bytes of arguments, in a line of constants that nothing else needs, it made tracing
// cost a sixth more of a small call.
template <class Body, class Rec>
TK_ENTRY(Body::kMaxThreads, min_blocks<Body>())
entry(typename Rec::Args trace, TK_ARGUMENT typename Body::Args args, const LaunchSize size) {
    Warp warp(size);
    Body::template run<Rec>(warp, args, trace);
}

// What runs where a launch is not recorded: a body that is there for its records alone names another one as `Untraced`.
template <class Body, class Rec>
struct BodyWith {
    using Type = Body;
};
template <class Body>
    requires requires { typename Body::Untraced; }
struct BodyWith<Body, Recorder<false>> {
    using Type = typename Body::Untraced;
};

template <class Family>
const void* kernel_address(const typename Family::Config& config, typename Family::Stage stage, BodyKind kind) {
    const void* address = nullptr;
    Family::with_kernels(config, [&]<class Kernels>(Kernels) {
        Kernels::with(stage, [&]<class Body>() {
            with_recorder_type<typename Family::Bodies>(kind, [&]<class Rec>() {
                address = reinterpret_cast<const void*>(&entry<typename BodyWith<Body, Rec>::Type, Rec>);
            });
        });
    });
    return address;
}

#ifdef TK_PLANTED_FAULTS
template <class Family>
void plant_in_kernels(PlantedFault fault) {
    set_variable(planted_fault, fault);
}
    #define TK_PLANT_IN_KERNELS(Family) template void tracekern::plant_in_kernels<Family>(tracekern::PlantedFault);
#else
    #define TK_PLANT_IN_KERNELS(Family)
#endif

}  // namespace tracekern

#define TK_FAMILY_KERNELS(Family)                                                         \
    template const void* tracekern::kernel_address<tracekern::Family>(                    \
        const tracekern::Family::Config&, tracekern::Family::Stage, tracekern::BodyKind); \
    TK_PLANT_IN_KERNELS(tracekern::Family)
