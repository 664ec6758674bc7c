// What is to be known of a GPU before kernels spin on it. tracekern/comm/devices/preflight.py judges.
#pragma once

#include <map>

#include "platform/gpu_host.hpp"

namespace tracekern {

struct DriverVersions {
    int driver;   // the newest CUDA that the driver serves, 1000 * major + 10 * minor
    int runtime;  // that this build was made with
};

struct DeviceFacts {
    std::string name;
    std::string bus_id;
    uint64_t free_bytes;
    uint64_t total_bytes;
    bool has_mps;                           // other processes' kernels may run beside ours
    bool exports_memory;                    // by file descriptor
    std::map<std::string, bool> reachable;  // bus id of every other visible GPU -> can this one map its memory?
};

// 0 where there is no driver, or one that serves no GPU.
inline int count_devices() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Works with any driver, too old ones included.
inline DriverVersions driver_versions() {
    DriverVersions versions{};
    TK_CUDA(cudaDriverGetVersion(&versions.driver));
    TK_CUDA(cudaRuntimeGetVersion(&versions.runtime));
    return versions;
}

// 32 hexadecimal digits.
inline std::string device_uuid(int device) {
    cudaDeviceProp properties;
    TK_CUDA(cudaGetDeviceProperties(&properties, device));
    std::string text;
    for (const char byte : properties.uuid.bytes) {
        constexpr char kDigits[] = "0123456789abcdef";
        text += kDigits[static_cast<uint8_t>(byte) >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

inline int device_with(const std::string& uuid) {
    int count = 0;
    TK_CUDA(cudaGetDeviceCount(&count));
    for (int device = 0; device < count; ++device) {
        if (device_uuid(device) == uuid) return device;
    }
    throw std::runtime_error("none of the " + std::to_string(count) + " GPUs in sight has UUID " + uuid);
}

inline std::string device_bus_id(int device) {
    char text[32] = {};
    TK_CUDA(cudaDeviceGetPCIBusId(text, sizeof(text), device));
    return text;
}

// Of the current device.
inline DeviceFacts device_facts() {
    DeviceFacts facts;
    const int device = current_device();
    int num_devices = 0;
    TK_CUDA(cudaGetDeviceCount(&num_devices));
    cudaDeviceProp properties;
    TK_CUDA(cudaGetDeviceProperties(&properties, device));
    facts.name = properties.name;
    facts.bus_id = device_bus_id(device);
    size_t free_bytes = 0, total_bytes = 0;
    TK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    facts.free_bytes = free_bytes;
    facts.total_bytes = total_bytes;
    facts.has_mps = driver_attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) != 0;
    facts.exports_memory = driver_attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) &&
                           driver_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
    for (int other = 0; other < num_devices; ++other) {
        if (other == device) continue;
        int reachable = 0;
        TK_CUDA(cudaDeviceCanAccessPeer(&reachable, device, other));
        facts.reachable[device_bus_id(other)] = reachable != 0;
    }
    return facts;
}

// What ended the current device's use by this process, such as a trap; empty: nothing did. Does not wait for kernels.
inline std::string device_error() {
    const BesideGraphCapture beside;
    const cudaError_t code = cudaStreamQuery(nullptr);
    if (code != cudaSuccess) cudaGetLastError();  // reported here, "not ready" too; what another call left stays
    // While this thread captures a graph it may not ask, which says nothing of the device.
    const bool is_refused = code >= cudaErrorStreamCaptureUnsupported && code <= cudaErrorStreamCaptureWrongThread;
    return code == cudaSuccess || code == cudaErrorNotReady || is_refused ? "" : cudaGetErrorString(code);
}

}  // namespace tracekern
