// A libfabric in front of the real one, which is named by SHIM_LIBRARY: its completion queues fail, lose what came, or
// are not read, and it has no room or no memory, when a test says so.
#include <algorithm>
#include <atomic>

#include "fabric_in_front.hpp"

extern "C" {
std::atomic<int> shim_is_broken = 0;  // every queue
std::atomic<int> shim_num_lost = 0;   // arrivals that are not told
// How often the second queue can still be read; -1: without end. In between, its domain receives nothing.
std::atomic<int> shim_num_reads = -1;
std::atomic<int> shim_num_queues = 0;        // that were opened
std::atomic<int> shim_num_full = 0;          // receive buffers that there is no room for
std::atomic<int> shim_regs_until_full = -1;  // regions that can still be registered before one that cannot
std::atomic<int> shim_num_regions = 0;       // that are open
}

namespace {

using namespace in_front;

std::atomic<fid_cq*> second_queue = nullptr;
decltype(fi_ops_cq::readfrom) real_readfrom;
decltype(fi_ops_domain::cq_open) real_cq_open;
decltype(fi_ops_domain::endpoint) real_endpoint;
decltype(fi_ops_msg::recv) real_recv;
decltype(fi_ops_mr::reg) real_reg;
decltype(fi_ops::close) real_close_region;

ssize_t recv(fid_ep* endpoint, void* at, size_t bytes, void* local, fi_addr_t from, void* context) {
    if (shim_num_full > 0) {
        --shim_num_full;
        return -FI_EAGAIN;
    }
    return real_recv(endpoint, at, bytes, local, from, context);
}
int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** endpoint, void* context) {
    const int result = real_endpoint(domain, info, endpoint, context);
    if (result != 0) return result;
    real_recv = (*endpoint)->msg->recv;
    (*endpoint)->msg = copy((*endpoint)->msg);
    (*endpoint)->msg->recv = recv;
    return 0;
}
int close_region(fid* region) {
    --shim_num_regions;
    return real_close_region(region);
}
int reg(fid* domain,
        const void* at,
        size_t bytes,
        uint64_t access,
        uint64_t offset,
        uint64_t key,
        uint64_t flags,
        fid_mr** region,
        void* context) {
    if (shim_regs_until_full >= 0 && shim_regs_until_full-- == 0) return -FI_ENOMEM;
    const int result = real_reg(domain, at, bytes, access, offset, key, flags, region, context);
    if (result != 0) return result;
    ++shim_num_regions;
    real_close_region = (*region)->fid.ops->close;
    (*region)->fid.ops = copy((*region)->fid.ops);
    (*region)->fid.ops->close = close_region;
    return 0;
}

ssize_t readfrom(fid_cq* queue, void* into, size_t count, fi_addr_t* sources) {
    if (shim_is_broken) return -FI_EIO;
    if (queue == second_queue && shim_num_reads >= 0) {
        if (shim_num_reads == 0) return -FI_EAGAIN;
        --shim_num_reads;
    }
    const ssize_t found = real_readfrom(queue, into, count, sources);
    auto* entries = static_cast<fi_cq_data_entry*>(into);
    ssize_t left = 0;
    for (ssize_t i = 0; i < found; ++i) {
        const bool is_arrival = entries[i].flags & FI_REMOTE_CQ_DATA && !(entries[i].flags & FI_WRITE);
        if (is_arrival && shim_num_lost > 0) {
            --shim_num_lost;
            continue;
        }
        sources[left] = sources[i];
        entries[left++] = entries[i];
    }
    return found > 0 ? (left > 0 ? left : -FI_EAGAIN) : found;
}
int cq_open(fid_domain* domain, fi_cq_attr* attributes, fid_cq** queue, void* context) {
    const int result = real_cq_open(domain, attributes, queue, context);
    if (result != 0) return result;
    if (++shim_num_queues == 2) second_queue = *queue;
    real_readfrom = (*queue)->ops->readfrom;
    (*queue)->ops = copy((*queue)->ops);
    (*queue)->ops->readfrom = readfrom;
    return 0;
}

}  // namespace

int in_front::open_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context) {
    const int result = real_domain(fabric, info, domain, context);
    if (result != 0) return result;
    real_cq_open = (*domain)->ops->cq_open;
    real_endpoint = (*domain)->ops->endpoint;
    (*domain)->ops = copy((*domain)->ops);
    (*domain)->ops->cq_open = cq_open;
    (*domain)->ops->endpoint = open_endpoint;
    real_reg = (*domain)->mr->reg;
    (*domain)->mr = copy((*domain)->mr);
    (*domain)->mr->reg = reg;
    return 0;
}

extern "C" int fi_getinfo(
    uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints, fi_info** info) {
    return in_front::real(&fi_getinfo, "fi_getinfo")(version, node, service, flags, hints, info);
}
