// What a capture keeps on a GPU: its arena within reach of kernels, and the mirror, a twin of the arena in device
// memory, for launches whose records are too dense to cross the bus one by one.
#pragma once

#include <memory>
#include <optional>

#include "platform/gpu_facts.hpp"
#include "trace/record.h"

namespace tracekern {

class GpuCapture {
public:
    // arena: host memory of this process, of whole pages.
    GpuCapture(uint64_t arena, uint64_t arena_bytes) : arena_(arena), arena_bytes_(arena_bytes) {
        if (register_host_memory(arena, arena_bytes) != arena) {
            unregister_host_memory(arena);
            throw std::runtime_error("this GPU sees host memory at another address than the host");
        }
    }
    ~GpuCapture() {
        try {
            release();
        } catch (const std::exception&) {  // a device that trapped answers every call with its fault
        }
    }
    GpuCapture(const GpuCapture&) = delete;

    // Address of the mirror, zeroed; it is allocated when it is first asked for.
    uint64_t mirror() {
        if (kept_) return reinterpret_cast<uint64_t>(kept_->data());
        if (!mirror_) mirror_ = std::make_unique<DeviceMemory>(arena_bytes_);
        return reinterpret_cast<uint64_t>(mirror_->as<char>());
    }
    // A descriptor by which another process maps the mirror (KeptMirror); to be asked for before the mirror is. The
    // caller closes it.
    int export_mirror() {
        kept_.emplace(ShareableMemory::allocate(arena_bytes_));
        return kept_->export_descriptor();
    }
    // No other process maps it, and nothing was recorded there.
    void drop_mirror() { kept_.reset(); }
    // Copies a part of the mirror to its place in the arena; finish() waits for all of them.
    void collect(uint64_t offset, uint64_t bytes) {
        stream_.copy_to_host(
            reinterpret_cast<void*>(arena_ + offset), reinterpret_cast<const void*>(mirror() + offset), bytes);
    }
    void finish() const { stream_.synchronize(); }

    // The arena is about to go.
    void release() {
        if (arena_) unregister_host_memory(std::exchange(arena_, 0));
    }

private:
    uint64_t arena_;
    const uint64_t arena_bytes_;
    const SideStream stream_;
    std::unique_ptr<DeviceMemory> mirror_;
    std::optional<ShareableMemory> kept_;
};

// The mirror of another process, which may be gone. The memory stays as long as this maps it: after a trap, an illegal
// access or a SIGKILL all words that its kernels had stored were there, and it could be read while one of them hung.
class KeptMirror {
public:
    KeptMirror(const std::string& uuid, int descriptor, uint64_t bytes)
        : memory_((use_device(device_with(uuid)), ShareableMemory::import(descriptor, bytes))) {}

    void copy(uint64_t arena, uint64_t offset, uint64_t bytes) const {
        copy_to_host(reinterpret_cast<void*>(arena + offset), static_cast<const char*>(memory_.data()) + offset, bytes);
    }

private:
    const ShareableMemory memory_;
};

}  // namespace tracekern
