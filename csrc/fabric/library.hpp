// libfabric, loaded when the first engine asks for it: a process may fork before, and builds without it still run.
#pragma once

#include <dlfcn.h>
#include <rdma/fabric.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "fabric/forks.hpp"

namespace tracekern {

// The entry points that libfabric exports; all others are reached through the objects it makes.
class FabricLibrary {
public:
    static constexpr uint32_t kVersion = FI_VERSION(1, 17);

    // path: of libfabric.so.1; "": where the loader finds it. Throws std::runtime_error that says what is missing.
    explicit FabricLibrary(const std::string& path) {
        count_forks();
        const std::string name = path.empty() ? "libfabric.so.1" : path;
        handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!handle_) throw std::runtime_error(name + " cannot be loaded: " + dlerror());
        find(getinfo, "fi_getinfo");
        find(freeinfo, "fi_freeinfo");
        find(dupinfo, "fi_dupinfo");
        find(open_fabric, "fi_fabric");
        find(strerror, "fi_strerror");
        find(version, "fi_version");
    }
    FabricLibrary(const FabricLibrary&) = delete;

    // Never unloaded: providers leave threads and exit handlers behind.
    decltype(&::fi_getinfo) getinfo = nullptr;
    decltype(&::fi_freeinfo) freeinfo = nullptr;
    decltype(&::fi_dupinfo) dupinfo = nullptr;
    decltype(&::fi_fabric) open_fabric = nullptr;
    decltype(&::fi_strerror) strerror = nullptr;
    decltype(&::fi_version) version = nullptr;

    // "write: Connection refused (-111)" for what a call returned.
    std::string describe(const std::string& what, int64_t result) const {
        const int code = static_cast<int>(result < 0 ? -result : result);
        return what + ": " + strerror(code) + " (" + std::to_string(-code) + ")";
    }
    // Throws std::runtime_error if the call failed.
    void require(int64_t result, const std::string& what) const {
        if (result != 0) throw std::runtime_error(describe(what, result));
    }

private:
    template <class Function>
    void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(handle_, name));
        if (!function) throw std::runtime_error(std::string("libfabric has no ") + name);
    }

    void* handle_;
};

}  // namespace tracekern
