// What in_process_fabric.cpp is made of: domains, queues, and the NIC of each endpoint.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace in_process {

// ---- what others see of a domain ----

struct Completion {
    fi_cq_data_entry entry;
    uint64_t source = 0;  // address of the sender
    int error = 0;
};

struct Domain;

struct Queue : fid_cq {
    Domain* domain = nullptr;
    std::mutex mutex;
    std::deque<Completion> entries;
    int wakes = -1;  // eventfd

    void put(const Completion& completion) {
        const std::lock_guard lock(mutex);
        entries.push_back(completion);
        const uint64_t one = 1;
        if (wakes >= 0 && write(wakes, &one, sizeof(one)) < 0) abort();
    }
};

struct Memory {
    char* at;
    uint64_t bytes;
};

struct Receive {
    void* at;
    uint64_t bytes;
    void* context;
};

// Where a domain is reached. Outlives it, for those who still know its address.
struct Port {
    uint64_t number = 0;  // its address
    std::shared_mutex mutex;
    Queue* queue = nullptr;  // none: closed
    std::map<uint64_t, Memory> memories;
    std::mutex receives_mutex;
    std::deque<Receive> receives;
};

inline std::mutex ports_mutex;
inline std::vector<std::shared_ptr<Port>> ports;  // by number

// The engine promises that one thread at a time uses a domain and all that is in it. Each call writes here, without a
// lock: the race detector sees a promise that is broken.
struct OneThread {
    uint64_t num_calls = 0;
    void enter() { ++num_calls; }
};

struct Addresses : fid_av {
    std::vector<std::shared_ptr<Port>> known;
    std::unordered_map<uint64_t, fi_addr_t> places;
};

struct Domain : fid_domain {
    OneThread user;
    std::shared_ptr<Port> port;
    Addresses* addresses = nullptr;
    bool is_blind = false;
    uint64_t num_keys = 0;
};

struct Registration : fid_mr {
    Domain* domain;
};

// ---- the NIC ----

struct Work {
    std::vector<iovec> src;
    std::vector<fi_rma_iov> dst;  // of a write
    std::shared_ptr<Port> to;
    bool has_imm;
    uint64_t imm;
    void* context;
};

// A fault: immediates come before the bytes of their write.
#ifdef TK_TELLS_EARLY
constexpr bool kTellsEarly = true;
#else
constexpr bool kTellsEarly = false;
#endif
// How long some writes wait for their completion when nothing else is to do.
#ifdef TK_ANSWERS_LATE
constexpr int kAnswerMs = 100;
#else
constexpr int kAnswerMs = 0;
#endif

struct Endpoint : fid_ep {
    Domain* domain = nullptr;
    Queue* queue = nullptr;

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Work> writes, sends;
    std::deque<Work> written;  // not completed yet; the NIC's thread alone
    bool is_closing = false;
    std::mt19937 random;
    std::thread nic;

    static constexpr size_t kMostWritten = 8;

    void run() {
        std::unique_lock lock(mutex);
        while (true) {
            const auto has_work = [&] { return is_closing || !writes.empty() || !sends.empty(); };
            if (written.empty()) {
                changed.wait(lock, has_work);
            } else {
                changed.wait_for(lock, std::chrono::milliseconds(random() % 4 == 0 ? kAnswerMs : 0), has_work);
            }
            if (is_closing) return;
            if (!has_work() || written.size() == kMostWritten) {
                lock.unlock();
                complete_write();
                lock.lock();
                continue;
            }
            const bool is_send = writes.empty() || (!sends.empty() && random() % 2 == 0);
            auto& works = is_send ? sends : writes;
            if (!is_send) std::swap(works.front(), works[random() % std::min<size_t>(works.size(), 8)]);
            const Work work = std::move(works.front());
            works.pop_front();
            const uint32_t drawn = random() % 64;
            lock.unlock();
            dawdle(drawn);
            const int error = is_send ? send(work) : write(work);
            if (!is_send && error == 0) {
                written.push_back(work);
            } else if (error != FI_EAGAIN) {
                tell(*queue, work.context, is_send ? FI_SEND : FI_WRITE, 0, error);
            }
            lock.lock();
            if (error == FI_EAGAIN) sends.push_front(work);
        }
    }

    void complete_write() {
        const Work work = std::move(written.front());
        written.pop_front();
        read_again(work);
        tell(*queue, work.context, FI_WRITE, 0, 0);
    }
    static void dawdle(uint32_t drawn) {
        if (drawn < 2) std::this_thread::sleep_for(std::chrono::microseconds(100 * (drawn + 1)));
        if (drawn < 16) std::this_thread::yield();
    }
    static void tell(Queue& queue, void* context, uint64_t flags, uint64_t bytes, int error) {
        queue.put({{context, flags, bytes, nullptr, 0}, 0, error});
    }

    int write(const Work& work) const {
        Port& to = *work.to;
        const std::shared_lock lock(to.mutex);
        if (!to.queue) return FI_ECANCELED;
        uint64_t bytes = 0;
        const auto tell_immediate = [&] {
            constexpr uint64_t kFlags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
            if (work.has_imm) to.queue->put({{nullptr, kFlags, bytes, nullptr, work.imm}, domain->port->number});
        };
        if (kTellsEarly) tell_immediate();
        for (size_t i = 0; i < work.dst.size(); ++i) {
            const fi_rma_iov& dst = work.dst[i];
            const auto found = to.memories.find(dst.key);
            if (found == to.memories.end()) return FI_ECANCELED;
            const Memory& memory = found->second;
            if (dst.addr > memory.bytes || dst.len > memory.bytes - dst.addr) return FI_EINVAL;
            if (dst.len != 0) std::memcpy(memory.at + dst.addr, work.src[i].iov_base, dst.len);
            bytes += dst.len;
        }
        if (!kTellsEarly) tell_immediate();
        return 0;
    }
    // As if no answer had come: until a write is completed, its source is the NIC's.
    static void read_again(const Work& work) {
        for (const iovec& piece : work.src) {
            const auto* bytes = static_cast<const volatile char*>(piece.iov_base);
            for (size_t i = 0; i < piece.iov_len; ++i) [[maybe_unused]]
                const char byte = bytes[i];
        }
    }
    int send(const Work& work) const {
        Port& to = *work.to;
        const std::shared_lock lock(to.mutex);
        if (!to.queue) return FI_ECANCELED;
        const std::lock_guard receives_lock(to.receives_mutex);
        if (to.receives.empty()) return FI_EAGAIN;
        const Receive receive = to.receives.front();
        to.receives.pop_front();
        const iovec& src = work.src[0];
        const uint64_t bytes = std::min<uint64_t>(receive.bytes, src.iov_len);
        if (bytes != 0) std::memcpy(receive.at, src.iov_base, bytes);
        tell(*to.queue, receive.context, FI_MSG | FI_RECV, bytes, bytes < src.iov_len ? FI_ETRUNC : 0);
        return 0;
    }

    ssize_t post(std::deque<Work>& works, Work work) {
        domain->user.enter();
        constexpr size_t kRoom = 24;
        const std::lock_guard lock(mutex);
        if (works.size() >= kRoom || random() % 16 == 0) return -FI_EAGAIN;
        works.push_back(std::move(work));
        changed.notify_one();
        return 0;
    }
};

}  // namespace in_process
