// What the host needs of CUDA: errors that say which call, memory that frees itself, memory that peers can map,
// launches.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tracekern {

inline void check(cudaError_t code, const char* call) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // reported here: the next caller must not take it for its own
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}
#define TK_CUDA(call) ::tracekern::check(call, #call)

// A function of the driver, found at run time: the extension imports, and builds, where there is none.
template <class Function>
Function* driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    TK_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
    if (!function) throw std::runtime_error(std::string(name) + ": the driver has no such function; update it");
    return reinterpret_cast<Function*>(function);
}
#define TK_DRIVER(name) ::tracekern::driver_function<decltype(name)>(#name)

inline void check(CUresult code, const char* call) {
    if (code == CUDA_SUCCESS) return;
    const char* text = nullptr;
    TK_DRIVER(cuGetErrorString)(code, &text);
    throw std::runtime_error(std::string(call) + ": " + (text ? text : "unknown error"));
}

inline uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

// Through when it returns: cudaMemcpy alone may still be on its way, for kernels of other streams and for peers.
inline void copy_to_device(void* device, const void* host, uint64_t bytes) {
    TK_CUDA(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    TK_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}
inline void copy_to_host(void* host, const void* device, uint64_t bytes) {
    TK_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}
// Through when it returns: streams that do not wait for the default one are to find it zero, too.
inline void clear_device(void* device, uint64_t bytes) {
    TK_CUDA(cudaMemset(device, 0, bytes));
    TK_CUDA(cudaStreamSynchronize(cudaStreamLegacy));
}
inline void clear_device_on(uint64_t stream, void* device, uint64_t bytes) {
    TK_CUDA(cudaMemsetAsync(device, 0, bytes, reinterpret_cast<cudaStream_t>(stream)));
}
// Sets a TK_VARIABLE of the calling source file on the current device.
template <class T>
void set_variable(const T& variable, const T& value) {
    TK_CUDA(cudaMemcpyToSymbol(variable, &value, sizeof(T)));
}
inline int current_device() {
    int device = 0;
    TK_CUDA(cudaGetDevice(&device));
    return device;
}
inline void use_device(int device) {
    TK_CUDA(cudaSetDevice(device));
    TK_CUDA(cudaFree(nullptr));  // the driver's calls want a context
}
inline void synchronize_device() {
    TK_CUDA(cudaDeviceSynchronize());
}

// Lets kernels write to host memory; returns the address that the device uses for it.
inline uint64_t register_host_memory(uint64_t address, uint64_t bytes) {
    auto* memory = reinterpret_cast<void*>(address);
    TK_CUDA(cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    void* device = nullptr;
    TK_CUDA(cudaHostGetDevicePointer(&device, memory, 0));
    return reinterpret_cast<uint64_t>(device);
}
inline void unregister_host_memory(uint64_t address) {
    TK_CUDA(cudaHostUnregister(reinterpret_cast<void*>(address)));
}

// Zeroed device memory.
class DeviceMemory {
public:
    explicit DeviceMemory(uint64_t bytes) {
        TK_CUDA(cudaMalloc(&data_, bytes));
        clear_device(data_, bytes);
    }
    ~DeviceMemory() { cudaFree(data_); }
    DeviceMemory(const DeviceMemory&) = delete;
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
};

// Zeroed host memory that the device reaches at the same address.
class MappedMemory {
public:
    explicit MappedMemory(uint64_t bytes) {
        TK_CUDA(cudaHostAlloc(&data_, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
        memset(data_, 0, bytes);
    }
    ~MappedMemory() { cudaFreeHost(data_); }
    MappedMemory(const MappedMemory&) = delete;
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
};

// A stream that runs beside all others.
class SideStream {
public:
    SideStream() { TK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    ~SideStream() { cudaStreamDestroy(stream_); }
    SideStream(const SideStream&) = delete;

    uint64_t handle() const { return reinterpret_cast<uint64_t>(stream_); }
    void copy_to_host(void* host, const void* device, uint64_t bytes) const {
        TK_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_));
    }
    void synchronize() const { TK_CUDA(cudaStreamSynchronize(stream_)); }
    // Asks seldom: a profiler makes a span of each question.
    bool is_idle_within(uint64_t limit_ns) const {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
        cudaError_t code;
        while ((code = cudaStreamQuery(stream_)) == cudaErrorNotReady && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        cudaGetLastError();  // else the next launch may be taken for a failed one
        if (code != cudaErrorNotReady) TK_CUDA(code);
        return code == cudaSuccess;
    }

private:
    cudaStream_t stream_ = nullptr;
};

// Lets this thread make any call while another one captures a graph: in that one's global mode a query would break it.
class BesideGraphCapture {
public:
    BesideGraphCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~BesideGraphCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    BesideGraphCapture(const BesideGraphCapture&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class StreamEvent {
public:
    explicit StreamEvent(unsigned int flags = cudaEventDisableTiming) {
        const BesideGraphCapture beside;
        TK_CUDA(cudaEventCreateWithFlags(&event_, flags));
    }
    ~StreamEvent() { cudaEventDestroy(event_); }
    StreamEvent(const StreamEvent&) = delete;

    cudaEvent_t get() const { return event_; }
    void record(uint64_t stream) const { TK_CUDA(cudaEventRecord(event_, reinterpret_cast<cudaStream_t>(stream))); }
    // What is given to the stream from now on waits for what stood before the record.
    void hold(uint64_t stream) const { TK_CUDA(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), event_)); }

private:
    cudaEvent_t event_ = nullptr;
};

// A place in a stream of the current device, behind all that it was given before.
class StreamMark {
public:
    explicit StreamMark(uint64_t stream) {
        const BesideGraphCapture beside;
        event_.record(stream);
    }

    // Never where a kernel has trapped. Does not wait.
    bool is_passed() const {
        const BesideGraphCapture beside;
        const cudaError_t code = cudaEventQuery(event_.get());
        if (code == cudaErrorNotReady) cudaGetLastError();  // else the next launch may be taken for a failed one
        return code == cudaSuccess;
    }

private:
    const StreamEvent event_;
};

// Holds streams back until the host lets all of them go on at once, or has not done so for a while: a launch that has
// to load its kernel first waits for all streams.
class StreamGate {
public:
    StreamGate() : watchdog_([this] { watch(); }) {}
    ~StreamGate() {
        {
            const std::lock_guard lock(mutex_);
            is_over_ = true;
            open_locked();
        }
        watchdog_.join();
    }
    StreamGate(const StreamGate&) = delete;

    // What is given to the stream from now on waits for the next open().
    void hold(uint64_t stream) {
        const std::lock_guard lock(mutex_);
        if (!is_closed_) held_since_ = std::chrono::steady_clock::now();
        is_closed_ = true;
        changed_.notify_one();
        TK_CUDA(TK_DRIVER(cuStreamWaitValue32)(reinterpret_cast<CUstream>(stream),
                                               reinterpret_cast<CUdeviceptr>(word_.as<void>()),
                                               num_opened_ + 1,
                                               CU_STREAM_WAIT_VALUE_GEQ));
    }
    void open() {
        const std::lock_guard lock(mutex_);
        open_locked();
    }

private:
    static constexpr auto kLimit = std::chrono::seconds(1);

    void open_locked() {
        is_closed_ = false;
        __atomic_store_n(word_.as<uint32_t>(), ++num_opened_, __ATOMIC_RELEASE);
        changed_.notify_one();
    }
    void watch() {
        std::unique_lock lock(mutex_);
        while (!is_over_) {
            changed_.wait(lock, [this] { return is_closed_ || is_over_; });
            changed_.wait_until(lock, held_since_ + kLimit, [this] { return !is_closed_; });
            if (is_closed_ && std::chrono::steady_clock::now() >= held_since_ + kLimit) open_locked();
        }
    }

    const MappedMemory word_{sizeof(uint32_t)};
    uint32_t num_opened_ = 0;  // compared modulo 2^32 by the device, too
    bool is_closed_ = false, is_over_ = false;
    std::chrono::steady_clock::time_point held_since_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread watchdog_;  // last: it uses the others
};

// Device time from its construction to stop_ms(), on one stream.
class DeviceTimer {
public:
    explicit DeviceTimer(const SideStream& stream) : stream_(stream.handle()) { start_.record(stream_); }
    double stop_ms() const {
        float elapsed_ms = 0;
        stop_.record(stream_);
        TK_CUDA(cudaEventSynchronize(stop_.get()));
        TK_CUDA(cudaEventElapsedTime(&elapsed_ms, start_.get(), stop_.get()));
        return elapsed_ms;
    }

private:
    const uint64_t stream_;
    const StreamEvent start_{cudaEventDefault}, stop_{cudaEventDefault};
};

inline int driver_attribute(CUdevice_attribute attribute, int device) {
    int value = 0;
    TK_CUDA(TK_DRIVER(cuDeviceGetAttribute)(&value, attribute, device));
    return value;
}

// Device memory that other processes map by a file descriptor. Each rank exports its part and imports everybody else's.
class ShareableMemory {
public:
    // Allocates on the current device.
    static ShareableMemory allocate(uint64_t bytes) {
        ShareableMemory memory;
        memory.bytes_ = round_up(bytes, granularity());
        const CUmemAllocationProp properties = own_properties();
        TK_CUDA(TK_DRIVER(cuMemCreate)(&memory.handle_, memory.bytes_, &properties, 0));
        memory.map();
        clear_device(memory.data(), memory.bytes_);
        return memory;
    }
    // Maps what another process exported; the descriptor stays the caller's.
    static ShareableMemory import(int descriptor, uint64_t bytes) {
        ShareableMemory memory;
        memory.bytes_ = round_up(bytes, granularity());
        TK_CUDA(TK_DRIVER(cuMemImportFromShareableHandle)(&memory.handle_,
                                                          reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor)),
                                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        memory.map();
        return memory;
    }
    // A new descriptor for another process; the caller closes it.
    int export_descriptor() const {
        int descriptor = -1;
        TK_CUDA(
            TK_DRIVER(cuMemExportToShareableHandle)(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        return descriptor;
    }
    void* data() const { return reinterpret_cast<void*>(address_); }

    ShareableMemory(ShareableMemory&& other) noexcept
        : handle_(std::exchange(other.handle_, 0)),
          address_(std::exchange(other.address_, 0)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    ~ShareableMemory() {
        try {
            if (address_) {
                TK_DRIVER(cuMemUnmap)(address_, bytes_);
                TK_DRIVER(cuMemAddressFree)(address_, bytes_);
            }
            if (handle_) TK_DRIVER(cuMemRelease)(handle_);
        } catch (const std::runtime_error&) {
            // After a trap even the look-up of a function fails; the driver takes everything back with the process.
        }
    }

private:
    ShareableMemory() = default;

    static CUmemAllocationProp own_properties() {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = current_device();
        // So that a network card can reach the heap.
        constexpr auto kCanBeReached = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        properties.allocFlags.gpuDirectRDMACapable = driver_attribute(kCanBeReached, properties.location.id) != 0;
        return properties;
    }
    static uint64_t granularity() {
        const CUmemAllocationProp properties = own_properties();
        size_t unit = 0;
        TK_CUDA(TK_DRIVER(cuMemGetAllocationGranularity)(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
        return unit;
    }
    void map() {
        TK_CUDA(TK_DRIVER(cuMemAddressReserve)(&address_, bytes_, 0, 0, 0));
        TK_CUDA(TK_DRIVER(cuMemMap)(address_, bytes_, 0, handle_, 0));
        CUmemAccessDesc access{};
        access.location = own_properties().location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        TK_CUDA(TK_DRIVER(cuMemSetAccess)(address_, bytes_, &access, 1));
    }

    CUmemGenericAllocationHandle handle_ = 0;
    CUdeviceptr address_ = 0;
    uint64_t bytes_ = 0;
};

// Device memory that other processes map by a handle of CUDA IPC: for drivers that export no file descriptors. A twin
// for HIP allocates fine-grained memory, see platform/hip.h.
class IpcMemory {
public:
    // Allocates on the current device. Whole blocks of the allocator: a handle gives away all of the block it is in.
    static IpcMemory allocate(uint64_t bytes) {
        constexpr uint64_t kBlockBytes = 2 << 20;
        IpcMemory memory(/*is_own=*/true);
        TK_CUDA(cudaMalloc(&memory.data_, round_up(bytes, kBlockBytes)));
        clear_device(memory.data_, bytes);
        return memory;
    }
    // Maps what another process allocated.
    static IpcMemory open(const std::string& bytes) {
        cudaIpcMemHandle_t handle;
        if (bytes.size() != sizeof(handle)) throw std::runtime_error("a handle of CUDA IPC has other bytes");
        memcpy(&handle, bytes.data(), sizeof(handle));
        IpcMemory memory(/*is_own=*/false);
        TK_CUDA(cudaIpcOpenMemHandle(&memory.data_, handle, cudaIpcMemLazyEnablePeerAccess));
        return memory;
    }
    std::string handle() const {
        cudaIpcMemHandle_t handle;
        TK_CUDA(cudaIpcGetMemHandle(&handle, data_));
        return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
    }
    void* data() const { return data_; }

    IpcMemory(IpcMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)), is_own_(other.is_own_) {}
    ~IpcMemory() {
        if (data_) is_own_ ? cudaFree(data_) : cudaIpcCloseMemHandle(data_);
    }

private:
    explicit IpcMemory(bool is_own) : is_own_(is_own) {}

    void* data_ = nullptr;
    const bool is_own_;
};

inline uint32_t num_multiprocessors() {
    int count = 0;
    TK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_device()));
    return static_cast<uint32_t>(count);
}

// Loads a kernel now. Left to its first launch, loading may have to wait for a kernel that spins.
inline void load_kernel(const void* kernel) {
    cudaFuncAttributes attributes;
    TK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
}

// What ptxas gave a kernel, of each thread.
struct KernelResources {
    uint32_t registers;
    uint64_t local_bytes;  // stack and spills
};
inline KernelResources kernel_resources(const void* kernel) {
    cudaFuncAttributes attributes;
    TK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    return {static_cast<uint32_t>(attributes.numRegs), attributes.localSizeBytes};
}

// How a kernel is launched. Options are added with the first kernel that needs them.
struct LaunchOptions {
    uint32_t num_blocks;
    uint32_t num_threads;       // of a block
    uint64_t shared_bytes = 0;  // of a block, more than 48 KB included
    uint64_t stream = 0;
    bool is_cooperative = false;  // refused where not all blocks are resident together
};

// Dynamic shared memory above what every kernel may have is asked for, kernel by kernel.
inline void allow_shared_bytes(const void* kernel, uint64_t bytes) {
    constexpr uint64_t kAlwaysAllowed = 48 << 10;
    if (bytes <= kAlwaysAllowed) return;
    TK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// Launches a kernel by its address. `parameters` point at the arguments in the order of the kernel's list.
inline void launch_kernel(const void* kernel, const LaunchOptions& options, std::initializer_list<void*> parameters) {
    allow_shared_bytes(kernel, options.shared_bytes);
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(options.num_blocks);
    config.blockDim = dim3(options.num_threads);
    config.dynamicSmemBytes = options.shared_bytes;
    config.stream = reinterpret_cast<cudaStream_t>(options.stream);
    config.attrs = &cooperative;
    config.numAttrs = options.is_cooperative ? 1 : 0;
    TK_CUDA(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(parameters.begin())));
}

// Blocks of this kernel that the current device holds at once: what spins together must be resident together.
inline uint32_t resident_blocks(const void* kernel, const LaunchOptions& options) {
    allow_shared_bytes(kernel, options.shared_bytes);
    int per_sm = 0;
    TK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &per_sm, kernel, static_cast<int>(options.num_threads), options.shared_bytes));
    return static_cast<uint32_t>(per_sm) * num_multiprocessors();
}

}  // namespace tracekern
