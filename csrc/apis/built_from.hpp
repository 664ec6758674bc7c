// Which headers an extension was built from. Extensions hand each other communicators, whose layout these decide.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace tracekern {

// A hash of the headers that extensions share, from setup.py.
inline constexpr const char* kBuiltFrom = TK_BUILT_FROM;

// Raises ImportError where tracekern._core was built from other headers than this extension.
inline void require_same_core() {
    const auto core = pybind11::module_::import("tracekern._core");
    if (core.attr("built_from").cast<std::string>() != kBuiltFrom) {
        throw pybind11::import_error("built from other headers than tracekern._core");
    }
}

}  // namespace tracekern
