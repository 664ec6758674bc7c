// One network interface: an endpoint of libfabric, its completion queue, and the addresses of peers. One thread's.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "fabric/address.hpp"
#include "fabric/nets.hpp"
#include "fabric/segment_marker.hpp"
#include "fabric/trace.hpp"

namespace tracekern {

// Pieces that can be written as one, with one confirmation.
constexpr uint32_t kMostPieces = 4;

// What the provider calls back with; the first 64 bytes are the provider's while the operation is under way.
struct Operation {
    fi_context2 context;
    void* owner;      // the transfer that it is part of
    uint64_t index;   // its domain; of a message its buffer
    uint32_t target;  // of the transfer
    uint32_t num_pieces;
    Operation* next;  // in the pool
    RecordedSpan writes[kMostPieces];
};

// Memory as one domain knows it.
struct DomainMemory {
    fid_mr* region = nullptr;
    void* local = nullptr;  // what a post names it by
    uint64_t key = 0;
    uint64_t base = 0;
};

// From one region to another; raises the immediate once for each piece, after the bytes of all.
struct Write {
    fi_addr_t peer;
    uint32_t num_pieces;
    iovec src[kMostPieces];  // iov_base nullptr: an immediate alone
    void* local;             // DomainMemory::local of src
    fi_rma_iov dst[kMostPieces];
    bool has_imm;
    uint32_t imm;
};

// Closes an object of libfabric.
struct Close {
    template <class Object>
    void operator()(Object* object) const {
        fi_close(&object->fid);
    }
};

class Domain {
public:
    static constexpr uint32_t kNumCompletions = 8192;  // that its queue has room for

    // limit: how long the provider may be busy.
    Domain(const FabricLibrary& library, const Net& net, std::chrono::nanoseconds limit)
        : library_(library), net_(net), limit_(limit), info_(nullptr, library.freeinfo) {
        info_.reset(find_infos(library, net.provider, net.provider == "shm" ? name_for_shm() : net.source));
        const auto open = [&](auto& object, const char* what, auto call) {
            typename std::remove_reference_t<decltype(object)>::pointer opened = nullptr;
            const int64_t result = call(&opened);
            library.require(result, net.provider + " " + net.source + ": open the " + what);
            object.reset(opened);
        };
        open(fabric_, "fabric", [&](auto** to) { return library.open_fabric(info_->fabric_attr, to, nullptr); });
        open(domain_, "domain", [&](auto** to) { return fi_domain(fabric_.get(), info_.get(), to, nullptr); });
        fi_cq_attr queue{};
        queue.format = FI_CQ_FORMAT_DATA;
        queue.wait_obj = FI_WAIT_FD;
        queue.size = kNumCompletions;
        open(completions_, "completion queue", [&](auto** to) {
            if (fi_cq_open(domain_.get(), &queue, to, nullptr) == 0) return 0;
            queue.wait_obj = FI_WAIT_NONE;  // shm has none
            return fi_cq_open(domain_.get(), &queue, to, nullptr);
        });
        fi_av_attr addresses{};
        addresses.type = FI_AV_TABLE;
        open(
            addresses_, "address table", [&](auto** to) { return fi_av_open(domain_.get(), &addresses, to, nullptr); });
        open(endpoint_, "endpoint", [&](auto** to) { return fi_endpoint(domain_.get(), info_.get(), to, nullptr); });
        const auto require = [&](int64_t result, const char* what) {
            library.require(result, net.provider + " " + net.source + ": " + what);
        };
        if (queue.wait_obj == FI_WAIT_FD)
            require(fi_control(&completions_->fid, FI_GETWAIT, &descriptor_), "ask for the descriptor");
        require(fi_ep_bind(endpoint_.get(), &completions_->fid, FI_TRANSMIT | FI_RECV), "bind the completion queue");
        require(fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "bind the address table");
        require(fi_enable(endpoint_.get()), "enable the endpoint");
        char name[DomainAddress::kMaxBytes];
        size_t size = sizeof(name);
        require(fi_getname(&endpoint_->fid, name, &size), "ask for the address");
        address_.bytes.assign(name, size);
        if (net.provider == "shm") marker_.emplace(address_.bytes);
        nothing_ = register_memory(nothing_bytes_, sizeof(nothing_bytes_), FI_SEND | FI_WRITE);
        max_pieces_ = find_max_pieces();
        if (has_socket_addresses()) Connections::add(address_.bytes);
    }
    Domain(const Domain&) = delete;
    ~Domain() {
        close_memory(nothing_);
        if (!has_socket_addresses()) return;
        Connections::remove(address_.bytes);
        for (const auto& [address, place] : places_) Connections::remove(address);
    }

    // What was posted is let go of: no memory is read or written any more. Memory is closed next, then the rest.
    void close_endpoint() { endpoint_.reset(); }

    const Net& net() const { return net_; }
    const DomainAddress& address() const { return address_; }
    uint64_t max_write_bytes() const {
        const uint64_t most = info_->ep_attr->max_msg_size;
        return net_.provider == "tcp" ? std::min(most, kMaxWriteBytesOfTcp) : most;
    }
    uint32_t max_pieces() const { return max_pieces_; }
    // An immediate or message whose source is not told is from nobody that this endpoint knows.
    bool tells_sources() const { return info_->caps & FI_SOURCE; }
    bool has_socket_addresses() const {
        return info_->addr_format == FI_SOCKADDR_IN || info_->addr_format == FI_SOCKADDR_IN6;
    }
    // "fi_sockaddr_in://127.0.0.1:40471"
    std::string name_of(const DomainAddress& address) const {
        char text[128] = "";
        size_t size = sizeof(text) - 1;  // what is longer is cut
        fi_av_straddr(addresses_.get(), address.bytes.data(), text, &size);
        return text;
    }

    // Can be read from when something may have come; -1: the provider has none.
    int descriptor() const { return descriptor_; }
    // The descriptor will tell. False: ask the completion queue first.
    bool may_sleep() {
        fid* queue = &completions_->fid;
        return fi_trywait(fabric_.get(), &queue, 1) == 0;
    }

    // access: what may be done with it. Its key is drawn, where the provider does not choose one itself: who was not
    // told it cannot write there.
    DomainMemory register_memory(void* at, uint64_t bytes, uint64_t access) {
        const uint64_t most = info_->domain_attr->mr_key_size;
        const uint64_t key = most < sizeof(uint64_t) ? draw_number() & ((uint64_t{1} << 8 * most) - 1) : draw_number();
        DomainMemory memory;
        const int64_t result =
            retry([&] { return fi_mr_reg(domain_.get(), at, bytes, access, 0, key, 0, &memory.region, nullptr); });
        library_.require(result, net_.provider + " " + net_.source + ": register memory");
        memory.local = fi_mr_desc(memory.region);
        memory.key = fi_mr_key(memory.region);
        memory.base = info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? reinterpret_cast<uint64_t>(at) : 0;
        return memory;
    }
    // What describes it stays: other threads may be reading that.
    static void close_memory(DomainMemory& memory) {
        if (memory.region) fi_close(&std::exchange(memory.region, nullptr)->fid);
    }

    bool knows(const DomainAddress& address) const { return places_.contains(address.bytes); }
    // Each address once, however often it comes. None is taken out again: shm crashes then.
    fi_addr_t insert(const DomainAddress& address) {
        if (const auto known = places_.find(address.bytes); known != places_.end()) return known->second;
        if (!is_whole(address)) throw std::runtime_error(net_.provider + ": not an address of this network");
        // libfabric's shm looks up its own memory as the other one has mapped it, and uses endpoints that were closed.
        if (is_here(address)) throw std::runtime_error("shm: both engines are in this process; use tcp");
        fi_addr_t place = FI_ADDR_UNSPEC;
        const int64_t num_added =
            retry([&] { return fi_av_insert(addresses_.get(), address.bytes.data(), 1, &place, 0, nullptr); });
        if (num_added != 1) {
            throw std::runtime_error(net_.provider + ": no room for another peer after " +
                                     std::to_string(places_.size()) + "; make another engine");
        }
        if (has_socket_addresses()) Connections::add(address.bytes);
        return places_[address.bytes] = place;
    }

    // ---- posting: 0, -FI_EAGAIN for later, or another error ----

    // Completes when the bytes are in the peer's memory: a local completion would prove nothing.
    int64_t post_write(const Write& write, Operation* operation) {
        // EFA wants memory that it knows also for no bytes.
        const bool is_nothing = !write.src[0].iov_base;
        const iovec nothing{nothing_bytes_, 0};
        void* local[kMostPieces];
        std::fill_n(local, write.num_pieces, is_nothing ? nothing_.local : write.local);
        fi_msg_rma message{};
        message.msg_iov = is_nothing ? &nothing : write.src;
        message.desc = local;
        message.iov_count = write.num_pieces;
        message.addr = write.peer;
        message.rma_iov = write.dst;
        message.rma_iov_count = write.num_pieces;
        message.context = &operation->context;
        message.data = write.imm | uint64_t{write.num_pieces - 1} << 32;
        const uint64_t imm_flag = write.has_imm ? FI_REMOTE_CQ_DATA : 0;
        return later(fi_writemsg(endpoint_.get(), &message, FI_COMPLETION | FI_DELIVERY_COMPLETE | imm_flag));
    }
    int64_t post_send(const void* at, uint64_t bytes, void* local, fi_addr_t peer, Operation* operation) {
        return later(fi_send(endpoint_.get(), at, bytes, local, peer, &operation->context));
    }
    int64_t post_recv(void* at, uint64_t bytes, void* local, Operation* operation) {
        return later(fi_recv(endpoint_.get(), at, bytes, local, FI_ADDR_UNSPEC, &operation->context));
    }

    // Takes what has completed. on_imm(imm, source), on_done(operation, bytes), on_error(operation, text); returns how
    // many.
    template <class OnImm, class OnDone, class OnError>
    uint32_t poll(const OnImm& on_imm, const OnDone& on_done, const OnError& on_error) {
        constexpr uint32_t kBatch = 32;
        fi_cq_data_entry entries[kBatch];
        fi_addr_t sources[kBatch];
        const ssize_t count = later(fi_cq_readfrom(completions_.get(), entries, kBatch, sources));
        if (count == -FI_EAGAIN) return 0;
        if (count == -FI_EAVAIL) return take_error(on_error);
        if (count < 0) throw std::runtime_error(library_.describe("read the completion queue", count));
        for (ssize_t i = 0; i < count; ++i) {
            const fi_cq_data_entry& entry = entries[i];
            // A local completion of a write is none, whatever else it is flagged as; nor is a message with a number.
            if (entry.flags & FI_REMOTE_CQ_DATA && !(entry.flags & (FI_WRITE | FI_RECV))) {
                const uint64_t more = entry.data >> 32 & (kMostPieces - 1);
                for (uint64_t piece = 0; piece <= more; ++piece) on_imm(static_cast<uint32_t>(entry.data), sources[i]);
            } else {
                on_done(reinterpret_cast<Operation*>(entry.op_context), entry.len);
            }
        }
        return static_cast<uint32_t>(count);
    }

private:
    // Of one write. Their number travels beside the immediate, for which a provider needs 8 bytes.
    uint32_t find_max_pieces() const {
        if (info_->domain_attr->cq_data_size < sizeof(uint64_t)) return 1;
        if (net_.provider == "shm") return 1;  // it copies short writes faster one by one: 4 KiB in fours took 1.25x
        const size_t most = std::min(info_->tx_attr->iov_limit, info_->tx_attr->rma_iov_limit);
        return static_cast<uint32_t>(std::clamp<size_t>(most, 1, kMostPieces));
    }
    // Over shm, in this process. Its addresses are "fi_shm://PROCESS-DRAWN:USER:ENDPOINT".
    bool is_here(const DomainAddress& address) const {
        const auto process = [](const std::string& name) { return name.substr(0, name.find('-')); };
        return net_.provider == "shm" && process(address.bytes) == process(address_.bytes);
    }
    // What was interrupted is tried again later, like what there was no room for; nothing else is.
    static int64_t later(int64_t result) { return result == -FI_EINTR ? -FI_EAGAIN : result; }
    // For calls outside of the turns: drives the provider meanwhile.
    template <class Call>
    int64_t retry(Call call) {
        const auto until = std::chrono::steady_clock::now() + limit_;
        while (true) {
            const int64_t result = later(call());
            if (result != -FI_EAGAIN || std::chrono::steady_clock::now() > until) return result;
            fi_cq_read(completions_.get(), nullptr, 0);
            std::this_thread::yield();
        }
    }

    // A provider reads up to the end of a text, or else as many bytes as its own addresses have; tcp takes no address
    // any more after the first one had an unknown family.
    bool is_whole(const DomainAddress& address) const {
        const std::string& bytes = address.bytes;
        if (net_.provider == "shm") return is_shm_name(bytes);
        if (info_->addr_format == FI_ADDR_STR) {
            const std::string scheme = address_.bytes.substr(0, address_.bytes.find("://") + 3);
            return bytes.size() <= kMaxText && bytes.starts_with(scheme) && bytes.find('\0') == bytes.size() - 1;
        }
        constexpr size_t kFamily = sizeof(sa_family_t);
        if (has_socket_addresses() && bytes.compare(0, kFamily, address_.bytes, 0, kFamily) != 0) return false;
        return bytes.size() == address_.bytes.size();
    }

    // "PROCESS-DRAWN" as the first of three: nobody can have made a file of this name before.
    static std::string name_for_shm() { return std::to_string(getpid()) + "-" + std::to_string(draw_number()); }
    // Of at most 20 digits each: shm takes any other file in /dev/shm for an endpoint as well, and crashes.
    static bool is_shm_name(const std::string& bytes) {
        char digits[32];
        int end = -1;
        std::sscanf(
            bytes.c_str(), "fi_shm://%10[0-9]-%20[0-9]:%10[0-9]:%10[0-9]%n", digits, digits, digits, digits, &end);
        return end >= 0 && static_cast<size_t>(end) + 1 == bytes.size();  // with a 0 behind it
    }

    template <class OnError>
    uint32_t take_error(const OnError& on_error) {
        fi_cq_err_entry error{};
        if (fi_cq_readerr(completions_.get(), &error, 0) < 0) return 0;
        on_error(
            reinterpret_cast<Operation*>(error.op_context),
            std::string(library_.strerror(error.err)) + " (provider's code " + std::to_string(error.prov_errno) + ")");
        return 1;
    }

    // Of longer ones the sender's copy into the socket and the receiver's out of it overlap less: 32 MiB took half as
    // long again (benchmarks/fabric.py).
    static constexpr uint64_t kMaxWriteBytesOfTcp = 1 << 20;
    static constexpr size_t kMaxText = 140;  // of an address; providers have buffers of fixed size for it

    const FabricLibrary& library_;
    const Net net_;
    const std::chrono::nanoseconds limit_;
    // Each is closed before those that it was made from.
    std::unique_ptr<fi_info, decltype(FabricLibrary::freeinfo)> info_;
    std::unique_ptr<fid_fabric, Close> fabric_;
    std::unique_ptr<fid_domain, Close> domain_;
    std::unique_ptr<fid_cq, Close> completions_;
    std::unique_ptr<fid_av, Close> addresses_;
    std::unique_ptr<fid_ep, Close> endpoint_;
    std::optional<SegmentMarker> marker_;  // shm
    int descriptor_ = -1;
    DomainAddress address_;
    uint32_t max_pieces_ = 1;
    char nothing_bytes_[8] = {};
    DomainMemory nothing_;                               // what an immediate alone is sent from
    std::unordered_map<std::string, fi_addr_t> places_;  // of peers, by address
};

}  // namespace tracekern
