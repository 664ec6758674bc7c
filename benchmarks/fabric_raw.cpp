// The yardstick of benchmarks/fabric.py: the same writes over libfabric alone, as lean as they can be written. One
// thread a process posts and polls; done means FI_DELIVERY_COMPLETE, as it does for the engine.
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "fabric/nets.hpp"
#include "fabric_roles.hpp"

namespace {

using namespace tracekern;

class RawSide {
public:
    RawSide(const roles::Settings& settings, roles::Channel& channel, char* memory)
        : settings_(settings), library_(settings.library), memory_(memory), contexts_(settings.window) {
        open();
        library_.require(fi_mr_reg(domain_, memory_, roles::kMemoryBytes, kAccess, 0, 1, 0, &region_, nullptr), "reg");
        meet(channel);
        for (auto& context : contexts_) free_.push_back(&context);
    }

    void write(uint64_t count) {
        const uint64_t until = done_ + count;
        for (uint64_t i = 0; i < count; ++i) post(roles::offset_of(i, settings_.bytes));
        while (done_ < until) poll();
    }
    void receive(uint64_t count) {
        while (arrived_ < count) poll();
    }
    std::vector<double> ping(uint64_t count) {
        std::vector<double> half;
        for (uint64_t i = 0; i < count; ++i) {
            const double began = roles::now();
            const uint64_t until = arrived_ + 1;
            post(0);
            while (arrived_ < until) poll();
            half.push_back((roles::now() - began) / 2);
        }
        return half;
    }
    void pong(uint64_t count) {
        for (uint64_t i = 1; i <= count; ++i) {
            while (arrived_ < i) poll();
            post(0);
        }
    }
    void wait_for(roles::Channel& channel) {
        while (!channel.has_something()) poll();
        channel.get();
    }

private:
    static constexpr uint64_t kAccess = FI_WRITE | FI_REMOTE_WRITE;

    void open() {
        fi_info* info = find_infos(library_, settings_.provider, settings_.source);
        info->tx_attr->op_flags = FI_COMPLETION | FI_DELIVERY_COMPLETE;
        has_addresses_ = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
        library_.require(library_.open_fabric(info->fabric_attr, &fabric_, nullptr), "fabric");
        library_.require(fi_domain(fabric_, info, &domain_, nullptr), "domain");
        fi_cq_attr queue{};
        queue.format = FI_CQ_FORMAT_DATA;
        queue.size = 8192;
        library_.require(fi_cq_open(domain_, &queue, &completions_, nullptr), "cq");
        fi_av_attr addresses{};
        addresses.type = FI_AV_TABLE;
        library_.require(fi_av_open(domain_, &addresses, &addresses_, nullptr), "av");
        library_.require(fi_endpoint(domain_, info, &endpoint_, nullptr), "endpoint");
        library_.require(fi_ep_bind(endpoint_, &completions_->fid, FI_TRANSMIT | FI_RECV), "bind");
        library_.require(fi_ep_bind(endpoint_, &addresses_->fid, 0), "bind");
        library_.require(fi_enable(endpoint_), "enable");
    }

    // Each learns the other's address, key and place.
    void meet(roles::Channel& channel) {
        std::string name(256, '\0');
        size_t size = name.size();
        library_.require(fi_getname(&endpoint_->fid, name.data(), &size), "name");
        const uint64_t base = has_addresses_ ? reinterpret_cast<uint64_t>(memory_) : 0;
        const roles::Place theirs = roles::swap_places(channel, {name.substr(0, size), fi_mr_key(region_), base});
        if (fi_av_insert(addresses_, theirs.address.data(), 1, &peer_, 0, nullptr) != 1)
            throw std::runtime_error("no address");
        key_ = theirs.key;
        base_ = theirs.base;
    }

    void post(uint64_t offset) {
        while (free_.empty()) poll();
        fi_context2* context = free_.back();
        void* local = fi_mr_desc(region_);
        while (true) {
            const ssize_t result = fi_writedata(
                endpoint_, memory_ + offset, settings_.bytes, local, 1, peer_, base_ + offset, key_, context);
            if (result == 0) break;
            if (result != -FI_EAGAIN) library_.require(result, "write");
            poll();
        }
        free_.pop_back();
    }

    void poll() {
        fi_cq_data_entry entries[32];
        const ssize_t count = fi_cq_read(completions_, entries, 32);
        if (count == -FI_EAGAIN) return;
        if (count < 0) library_.require(count, "completion");
        for (ssize_t i = 0; i < count; ++i) {
            if (entries[i].flags & FI_REMOTE_CQ_DATA && !(entries[i].flags & FI_WRITE)) {
                ++arrived_;
            } else {
                ++done_;
                free_.push_back(static_cast<fi_context2*>(entries[i].op_context));
            }
        }
    }

    const roles::Settings& settings_;
    const FabricLibrary library_;
    char* const memory_;
    bool has_addresses_ = false;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* completions_ = nullptr;
    fid_av* addresses_ = nullptr;
    fid_ep* endpoint_ = nullptr;
    fid_mr* region_ = nullptr;
    fi_addr_t peer_ = FI_ADDR_UNSPEC;
    uint64_t key_ = 0, base_ = 0;
    std::vector<fi_context2> contexts_;
    std::vector<fi_context2*> free_;
    uint64_t done_ = 0, arrived_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    return roles::run<RawSide>(argc, argv);
}
