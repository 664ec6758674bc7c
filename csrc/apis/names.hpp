// Names for enums.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

namespace tracekern {

template <class Enum, size_t kCount>
Enum enum_named(const std::string& what, const std::string& name, const char* const (&names)[kCount]) {
    std::string wanted;
    for (size_t i = 0; i < kCount; ++i) {
        if (name == names[i]) return static_cast<Enum>(i);
        wanted += std::string(i ? ", " : "") + names[i];
    }
    throw std::invalid_argument(what + " is '" + name + "'; wanted one of " + wanted);
}

template <size_t kCount>
pybind11::list names_list(const char* const (&names)[kCount]) {
    pybind11::list result;
    for (const char* name : names) result.append(name);
    return result;
}

}  // namespace tracekern
