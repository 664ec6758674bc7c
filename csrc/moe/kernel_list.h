// The kernels of one call, as a list of bodies that both pipelines walk.
//
// A body is a type: kStage names it, Args is what it gets, kMaxThreads the largest block that it runs in, and
// run<Rec>(warp, args, trace) what one warp does. shared_bytes(args, warps_per_block) is the shared memory of a block.
#pragma once

#include <stdexcept>

namespace tracekern {

template <class... Bodies>
struct KernelList {
    // Calls f.operator()<Body>() for each, in the order of the call.
    template <class F>
    static void for_each(F f) {
        (f.template operator()<Bodies>(), ...);
    }

    // The same for the one body of a stage.
    template <class Stage, class F>
    static void with(Stage stage, F f) {
        const auto run_if_wanted = [&]<class Body>() {
            if (Body::kStage != stage) return false;
            f.template operator()<Body>();
            return true;
        };
        if (!(run_if_wanted.template operator()<Bodies>() || ...)) {
            throw std::invalid_argument("this variant has no kernel of that stage");
        }
    }
};

}  // namespace tracekern
