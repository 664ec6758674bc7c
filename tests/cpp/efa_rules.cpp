// A libfabric in front of the real one, which is named by SHIM_LIBRARY: its tcp has the rules of EFA (fabric
// efa-direct, fi_efa(7) of libfabric 2.x). What breaks a rule is refused, and said on stderr.
//
//   memory        is known by virtual addresses and keys of the provider; whatever is sent, written or received lies in
//                 memory that was registered and is named by its descriptor, also where it has no bytes
//   contexts      64 bytes, an operation's own, which the provider overwrites
//   sizes         writes up to EFA_WRITE_BYTES (a device's are 1 GiB), messages up to 8 KiB, immediates of 4 bytes
//   completions   polled for: a queue has nothing to wait on; in no order
//   peers         the target of a write knows the address that it comes from
#include <rdma/fi_rma.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fabric_in_front.hpp"

namespace {

using namespace in_front;

constexpr uint64_t kMaxMessageBytes = 8 << 10;
constexpr int kMrMode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

uint64_t max_write_bytes() {
    static const char* named = getenv("EFA_WRITE_BYTES");
    return named ? std::stoull(named) : 1 << 20;
}
int refuse(const std::string& what) {
    fprintf(stderr, "EFA's rules: %s\n", what.c_str());
    return -FI_EINVAL;
}

// ---- what objects are told apart by ----

struct Memory {
    uintptr_t at;
    uint64_t bytes;
};
struct Arrival {
    fi_cq_data_entry entry;
    fi_addr_t source;
};
struct Held {
    std::vector<Arrival> arrivals;
    std::mt19937 random{1};
};

std::mutex mutex;                  // of the next four, which all threads of a process share
std::map<void*, Memory> memories;  // by descriptor
std::map<void*, fid*> contexts;    // of what is under way: its endpoint
std::map<fid_cq*, Held> held;      // what a queue has not told yet
std::map<fid_mr*, void*> descriptors;

decltype(fi_ops_domain::cq_open) real_cq_open;
decltype(fi_ops_domain::endpoint) real_endpoint;
decltype(fi_ops_mr::reg) real_reg;
decltype(fi_ops::close) real_close_memory, real_close_queue, real_close_endpoint;
decltype(fi_ops_cq::readfrom) real_readfrom;
decltype(fi_ops_cq::readerr) real_readerr;
decltype(fi_ops_rma::writemsg) real_writemsg;
decltype(fi_ops_msg::send) real_send;
decltype(fi_ops_msg::recv) real_recv;

// ---- what is posted ----

// "" where the rules allow it.
std::string why_not(const void* at, uint64_t bytes, uint64_t most, void* descriptor, void* context) {
    if (bytes > most) return std::to_string(bytes) + " bytes; a device takes " + std::to_string(most) + " at once";
    const auto found = memories.find(descriptor);
    if (found == memories.end()) return "no descriptor of registered memory";
    const auto& [begin, size] = found->second;
    const auto start = reinterpret_cast<uintptr_t>(at);
    if (start < begin || start + bytes > begin + size) return "bytes outside of the memory of their descriptor";
    if (!context) return "no context";
    if (contexts.contains(context)) return "the context of another operation that is under way";
    return "";
}

template <class Post>
ssize_t post(fid_ep* endpoint, const char* what, const std::string& why, void* context, const Post& really) {
    if (!why.empty()) return refuse(std::string(what) + ": " + why);
    const ssize_t result = really();
    if (result != 0) return result;
    contexts[context] = &endpoint->fid;
    memset(context, 0x5a, sizeof(fi_context2));
    return 0;
}

ssize_t writemsg(fid_ep* endpoint, const fi_msg_rma* message, uint64_t flags) {
    const std::lock_guard lock(mutex);
    if (message->iov_count != 1 || message->rma_iov_count != 1 || !message->desc) {
        return refuse("write: wanted one piece of memory on each side, and its descriptor");
    }
    if (flags & FI_REMOTE_CQ_DATA && message->data >> 32 != 0) return refuse("write: more than 4 bytes of data");
    const iovec& from = message->msg_iov[0];
    const auto why = why_not(from.iov_base, from.iov_len, max_write_bytes(), message->desc[0], message->context);
    return post(endpoint, "write", why, message->context, [&] { return real_writemsg(endpoint, message, flags); });
}
ssize_t send(fid_ep* endpoint, const void* at, size_t bytes, void* descriptor, fi_addr_t to, void* context) {
    const std::lock_guard lock(mutex);
    const auto why = why_not(at, bytes, kMaxMessageBytes, descriptor, context);
    return post(
        endpoint, "send", why, context, [&] { return real_send(endpoint, at, bytes, descriptor, to, context); });
}
ssize_t recv(fid_ep* endpoint, void* at, size_t bytes, void* descriptor, fi_addr_t from, void* context) {
    const std::lock_guard lock(mutex);
    const auto why = why_not(at, bytes, kMaxMessageBytes, descriptor, context);
    return post(
        endpoint, "recv", why, context, [&] { return real_recv(endpoint, at, bytes, descriptor, from, context); });
}

// ---- completions ----

bool is_arrival(const fi_cq_data_entry& entry) {
    return entry.flags & FI_REMOTE_CQ_DATA && !(entry.flags & FI_WRITE);
}
void end_operation(void* context) {
    contexts.erase(context);
    memset(context, 0xa5, sizeof(fi_context2));
}

// Takes what the provider has, and tells about a third of what is held, in any order.
ssize_t readfrom(fid_cq* queue, void* into, size_t count, fi_addr_t* sources) {
    std::vector<fi_cq_data_entry> entries(count);
    std::vector<fi_addr_t> from(count);
    const ssize_t found = real_readfrom(queue, entries.data(), count, from.data());
    if (found < 0 && found != -FI_EAGAIN) return found;
    const std::lock_guard lock(mutex);
    auto& [arrivals, random] = held[queue];
    for (ssize_t i = 0; i < found; ++i) {
        const auto at = static_cast<size_t>(i);
        if (is_arrival(entries[at])) {
            if (from[at] == FI_ADDR_NOTAVAIL) return refuse("a write from an address that its target does not know");
            entries[at].data &= 0xffff'ffff;
        }
        arrivals.push_back({entries[at], from[at]});
    }
    if (arrivals.empty()) return -FI_EAGAIN;
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    const size_t told = std::min(count, (arrivals.size() + 2) / 3);
    for (size_t i = 0; i < told; ++i) {
        const auto [entry, source] = arrivals.back();
        arrivals.pop_back();
        if (!is_arrival(entry)) end_operation(entry.op_context);
        static_cast<fi_cq_data_entry*>(into)[i] = entry;
        sources[i] = source;
    }
    return static_cast<ssize_t>(told);
}
ssize_t readerr(fid_cq* queue, fi_cq_err_entry* into, uint64_t flags) {
    const ssize_t result = real_readerr(queue, into, flags);
    const std::lock_guard lock(mutex);
    if (result > 0 && contexts.contains(into->op_context)) end_operation(into->op_context);
    return result;
}
int close_queue(fid* queue) {
    const std::lock_guard lock(mutex);
    held.erase(reinterpret_cast<fid_cq*>(queue));
    return real_close_queue(queue);
}
int open_queue(fid_domain* domain, fi_cq_attr* attributes, fid_cq** queue, void* context) {
    if (attributes->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;
    const int result = real_cq_open(domain, attributes, queue, context);
    if (result != 0) return result;
    real_readfrom = (*queue)->ops->readfrom;
    real_readerr = (*queue)->ops->readerr;
    real_close_queue = (*queue)->fid.ops->close;
    (*queue)->ops = copy((*queue)->ops);
    (*queue)->ops->readfrom = readfrom;
    (*queue)->ops->readerr = readerr;
    (*queue)->fid.ops = copy((*queue)->fid.ops);
    (*queue)->fid.ops->close = close_queue;
    return 0;
}

// ---- endpoints ----

int close_endpoint(fid* endpoint) {
    const int result = real_close_endpoint(endpoint);
    const std::lock_guard lock(mutex);
    std::erase_if(contexts, [&](const auto& one) { return one.second == endpoint; });
    return result;
}
int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** endpoint, void* context) {
    const int result = real_endpoint(domain, info, endpoint, context);
    if (result != 0) return result;
    real_writemsg = (*endpoint)->rma->writemsg;
    real_send = (*endpoint)->msg->send;
    real_recv = (*endpoint)->msg->recv;
    real_close_endpoint = (*endpoint)->fid.ops->close;
    (*endpoint)->rma = copy((*endpoint)->rma);
    (*endpoint)->rma->writemsg = writemsg;
    (*endpoint)->msg = copy((*endpoint)->msg);
    (*endpoint)->msg->send = send;
    (*endpoint)->msg->recv = recv;
    (*endpoint)->fid.ops = copy((*endpoint)->fid.ops);
    (*endpoint)->fid.ops->close = close_endpoint;
    return 0;
}

// ---- memory ----

int close_memory(fid* memory) {
    const std::lock_guard lock(mutex);
    const auto found = descriptors.find(reinterpret_cast<fid_mr*>(memory));
    if (found != descriptors.end()) {
        memories.erase(found->second);
        descriptors.erase(found);
    }
    return real_close_memory(memory);
}
int register_memory(fid* domain,
                    const void* at,
                    size_t bytes,
                    uint64_t access,
                    uint64_t offset,
                    uint64_t key,
                    uint64_t flags,
                    fid_mr** made,
                    void* context) {
    const int result = real_reg(domain, at, bytes, access, offset, key, flags, made, context);
    if (result != 0) return result;
    const std::lock_guard lock(mutex);
    memories[fi_mr_desc(*made)] = {reinterpret_cast<uintptr_t>(at), bytes};
    descriptors[*made] = fi_mr_desc(*made);
    real_close_memory = (*made)->fid.ops->close;
    (*made)->fid.ops = copy((*made)->fid.ops);
    (*made)->fid.ops->close = close_memory;
    return 0;
}

bool is_tcp(const fi_info* info) {
    return info->fabric_attr->prov_name && strcmp(info->fabric_attr->prov_name, "tcp") == 0;
}

}  // namespace

int in_front::open_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context) {
    const int result = real_domain(fabric, info, domain, context);
    if (result != 0 || !is_tcp(info)) return result;
    real_cq_open = (*domain)->ops->cq_open;
    real_endpoint = (*domain)->ops->endpoint;
    real_reg = (*domain)->mr->reg;
    (*domain)->ops = copy((*domain)->ops);
    (*domain)->ops->cq_open = open_queue;
    (*domain)->ops->endpoint = open_endpoint;
    (*domain)->mr = copy((*domain)->mr);
    (*domain)->mr->reg = register_memory;
    return 0;
}

extern "C" int fi_getinfo(
    uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints, fi_info** info) {
    const int result = in_front::real(&fi_getinfo, "fi_getinfo")(version, node, service, flags, hints, info);
    if (result != 0 || !is_tcp(*info)) return result;
    if ((hints->domain_attr->mr_mode & kMrMode) != kMrMode || !(hints->mode & FI_CONTEXT2)) {
        refuse("a program must offer FI_CONTEXT2, FI_MR_LOCAL, FI_MR_VIRT_ADDR, FI_MR_ALLOCATED and FI_MR_PROV_KEY");
        fi_freeinfo(*info);
        return -FI_ENODATA;
    }
    for (fi_info* one = *info; one; one = one->next) {
        one->mode |= FI_CONTEXT2;
        one->domain_attr->mr_mode = kMrMode;
        one->domain_attr->cq_data_size = 4;
        one->ep_attr->max_msg_size = max_write_bytes();
    }
    return 0;
}
