// The kernels of a family on a GPU: for its kernels.cu, which makes them, and for the host, which launches them.
#pragma once

#include "comm/mutation.h"
#include "moe/entry.h"
#include "trace/trace_choice.h"

namespace tracekern {

// The entry point of a stage of a call, with the body that a launch of that kind runs.
template <class Family>
const void* kernel_address(const typename Family::Config& config,
                           typename Family::Stage stage,
                           bool is_traced,
                           RecordFormat format) {
    const void* address = nullptr;
    Family::with_kernels(config, [&]<class Kernels>(Kernels) {
        Kernels::with(stage, [&]<class Body>() {
            with_recorder_type(
                is_traced, format, [&]<class Rec>() { address = reinterpret_cast<const void*>(&entry<Body, Rec>); });
        });
    });
    return address;
}

#ifdef TK_PLANTED_FAULTS
template <class Family>
void plant_in_kernels(PlantedFault fault);
    #define TK_PLANT_IN_KERNELS(Family)                                \
        template <>                                                    \
        void tracekern::plant_in_kernels<Family>(PlantedFault fault) { \
            set_variable(planted_fault, fault);                        \
        }
#else
    #define TK_PLANT_IN_KERNELS(Family)
#endif

}  // namespace tracekern

#define TK_FAMILY_KERNELS(Family)                                                                   \
    template const void* tracekern::kernel_address<tracekern::Family>(                              \
        const tracekern::Family::Config&, tracekern::Family::Stage, bool, tracekern::RecordFormat); \
    TK_PLANT_IN_KERNELS(tracekern::Family)
