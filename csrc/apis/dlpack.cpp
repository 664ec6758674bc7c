// tracekern._core: memory as a capsule of DLPack, from which torch makes a tensor. Only DLPack lets its maker say on
// which device it is: torch takes a bare address in a peer's memory for one of the peer's GPU, where this process maps
// nothing.
#include <pybind11/pybind11.h>

#include "apis/register.hpp"

namespace py = pybind11;

namespace {

// As in dlpack.h, before it had versions.
struct DlTensor {
    void* data;
    int32_t device_type;
    int32_t device_idx;
    int32_t num_dims;
    uint8_t type_code;
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};
struct DlManagedTensor {
    DlTensor tensor;
    void* context;
    void (*deleter)(DlManagedTensor*);
};

struct Bytes {
    DlManagedTensor managed;  // first: its deleter gets back to all of this
    PyObject* owner;
    int64_t shape, stride;
};

// Whoever took the tensor calls it, from any thread.
void release(DlManagedTensor* managed) {
    auto* bytes = reinterpret_cast<Bytes*>(managed);
    if (Py_IsInitialized()) {
        const py::gil_scoped_acquire hold;
        Py_DECREF(bytes->owner);
    }
    delete bytes;
}

// Whoever takes the tensor gives the capsule another name.
void release_unless_taken(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    release(static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

py::capsule make_capsule(
    const py::object& owner, uint64_t address, int64_t num_bytes, int32_t device_type, int32_t device_idx) {
    constexpr uint8_t kUnsigned = 1;
    auto* bytes = new Bytes{};
    bytes->shape = num_bytes;
    bytes->stride = 1;
    bytes->owner = owner.inc_ref().ptr();
    bytes->managed.tensor = {reinterpret_cast<void*>(address),
                             device_type,
                             device_idx,
                             1,
                             kUnsigned,
                             8,
                             1,
                             &bytes->shape,
                             &bytes->stride,
                             0};
    bytes->managed.deleter = &release;
    return py::capsule(&bytes->managed, "dltensor", &release_unless_taken);
}

}  // namespace

namespace tracekern {

void register_dlpack(py::module_& module) {
    module.def("dlpack",
               &make_capsule,
               py::arg("owner"),
               py::arg("address"),
               py::arg("num_bytes"),
               py::arg("device_type"),
               py::arg("device_idx"));
}

}  // namespace tracekern
