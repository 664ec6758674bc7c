// Asks the operating system whether a peer is still there, where the address tells how: faster and surer than silence.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>
#include <utility>

#include "fabric/domain.hpp"

namespace tracekern {

// shm: its address names a process of this host. tcp: its address is that of a socket that listens until it ends.
class Liveness {
public:
    Liveness() = default;
    Liveness(const Domain& domain, const DomainAddress& address) {
        constexpr char kShm[] = "fi_shm://";
        if (domain.net().provider == "shm" && address.bytes.starts_with(kShm)) {
            // A process that is not seen here may be in another namespace: only one that was seen can be seen to end.
            const int pid = std::atoi(address.bytes.c_str() + sizeof(kShm) - 1);
            if (pid > 0) process_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
        } else if (domain.net().provider == "tcp" && domain.has_socket_addresses()) {
            listener_ = address.bytes;
        }
    }
    Liveness(const Liveness&) = delete;
    Liveness(Liveness&& other) noexcept { *this = std::move(other); }
    Liveness& operator=(Liveness&& other) noexcept {
        std::swap(process_, other.process_);
        std::swap(probe_, other.probe_);
        std::swap(listener_, other.listener_);
        std::swap(interval_, other.interval_);
        std::swap(next_probe_, other.next_probe_);
        return *this;
    }
    ~Liveness() {
        if (process_ >= 0) close(process_);
        if (probe_ >= 0) close(probe_);
    }

    // True: it has ended for certain. Returns at once. A socket is asked when the peer is suspected for a while, and
    // less and less often: one that is stopped has to take each connection later.
    bool is_gone(bool is_suspect, std::chrono::steady_clock::time_point now) {
        if (process_ >= 0) return is_ready(process_, POLLIN);
        if (!is_suspect) {
            interval_ = kShortest;
            next_probe_ = now + interval_;
            return false;
        }
        if (listener_.empty() || (probe_ < 0 && now < next_probe_)) return false;
        next_probe_ = now + interval_;
        interval_ = std::min(2 * interval_, kLongest);
        return is_refused();
    }

private:
    using Time = std::chrono::milliseconds;
    static constexpr Time kShortest{20}, kLongest{1000};

    static bool is_ready(int file, short events) {
        pollfd waiting{file, events, 0};
        return ::poll(&waiting, 1, 0) == 1;
    }

    // Whether nobody listens there any more: connects without waiting, and looks at the outcome in later calls.
    bool is_refused() {
        int error = EINPROGRESS;
        if (probe_ < 0) {
            const auto* to = reinterpret_cast<const sockaddr*>(listener_.data());
            probe_ = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
            if (probe_ < 0) return false;
            error = connect(probe_, to, static_cast<socklen_t>(listener_.size())) == 0 ? 0 : errno;
        }
        if (error == EINPROGRESS && is_ready(probe_, POLLOUT)) {
            socklen_t size = sizeof(error);
            getsockopt(probe_, SOL_SOCKET, SO_ERROR, &error, &size);
        }
        if (error == EINPROGRESS) return false;
        close(std::exchange(probe_, -1));
        return error == ECONNREFUSED;
    }

    int process_ = -1, probe_ = -1;
    std::string listener_;
    Time interval_ = kShortest;
    std::chrono::steady_clock::time_point next_probe_;
};

}  // namespace tracekern
