// Buffers that the worker lends to users, who may give them back on any thread, also after the engine has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "fabric/forks.hpp"
#include "fabric/rule.hpp"

namespace tracekern {

// Where buffers come back to, until their owner is gone.
class Returns {
public:
    explicit Returns(std::function<void(uint64_t)> take) : take_(std::move(take)) {}

    void give(uint64_t buffer) {
        if (!process_.is_this()) return;
        const std::lock_guard lock(mutex_);
        if (take_) take_(buffer);
    }
    void end() {
        const std::lock_guard lock(mutex_);
        take_ = {};
    }

private:
    const Process process_;
    rule::Mutex mutex_;
    std::function<void(uint64_t)> take_;
};

// A message that has come, in the buffer that it came in. Goes back with its last user.
class LentBuffer {
public:
    LentBuffer(std::string_view bytes, uint64_t buffer, std::shared_ptr<void> memory, std::shared_ptr<Returns> returns)
        : bytes_(bytes), buffer_(buffer), memory_(std::move(memory)), returns_(std::move(returns)) {}
    LentBuffer(const LentBuffer&) = delete;
    ~LentBuffer() { returns_->give(buffer_); }

    std::string_view bytes() const { return bytes_; }

private:
    const std::string_view bytes_;
    const uint64_t buffer_;
    const std::shared_ptr<void> memory_;  // of the buffer
    const std::shared_ptr<Returns> returns_;
};

}  // namespace tracekern
