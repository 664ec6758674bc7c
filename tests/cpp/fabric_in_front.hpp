// What a libfabric in front of the real one has: the real one, which SHIM_LIBRARY names, does all that is not replaced.
//
// Who includes this defines fi_getinfo and open_domain.
#pragma once

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace in_front {

template <class Function>
Function real(Function, const char* name) {
    static void* library = dlopen(getenv("SHIM_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<Function>(dlsym(library, name));
}

// A copy of a provider's table of functions, to replace some of them: all objects of a kind share a table, and its
// copy.
template <class Table>
Table* copy(Table* table) {
    static std::mutex mutex;
    static auto& copies = *new std::map<Table*, Table*>();  // as long as the provider's
    const std::lock_guard lock(mutex);
    Table*& copied = copies[table];
    if (!copied) copied = static_cast<Table*>(memcpy(malloc(table->size), table, table->size));
    return copied;
}

inline decltype(fi_ops_fabric::domain) real_domain;
int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context);

}  // namespace in_front

extern "C" {
void fi_freeinfo(fi_info* info) {
    in_front::real(&fi_freeinfo, "fi_freeinfo")(info);
}
fi_info* fi_dupinfo(const fi_info* info) {
    return in_front::real(&fi_dupinfo, "fi_dupinfo")(info);
}
const char* fi_strerror(int code) {
    return in_front::real(&fi_strerror, "fi_strerror")(code);
}
uint32_t fi_version(void) {
    return in_front::real(&fi_version, "fi_version")();
}
int fi_fabric(fi_fabric_attr* attributes, fid_fabric** fabric, void* context) {
    const int result = in_front::real(&fi_fabric, "fi_fabric")(attributes, fabric, context);
    if (result != 0) return result;
    in_front::real_domain = (*fabric)->ops->domain;
    (*fabric)->ops = in_front::copy((*fabric)->ops);
    (*fabric)->ops->domain = in_front::open_domain;
    return 0;
}
}
