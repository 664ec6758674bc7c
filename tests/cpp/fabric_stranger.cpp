// A program that knows where an engine listens, which anybody can see, and nothing else of it.
//
//   fabric_stranger LIBRARY ADDRESS KEYS
//
// ADDRESS: of a domain of tcp, as digits. Writes to each of the first KEYS keys, with an immediate and without bytes as
// well, then sends more messages with a number than an engine has receive buffers, among them some that look like an
// engine's. Prints how many operations have completed well. Exit: 0; 2 usage.
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fabric/messages.hpp"
#include "fabric/nets.hpp"

using namespace tracekern;

namespace {

constexpr uint32_t kNumMessages = 600;

class Stranger {
public:
    Stranger(const std::string& library, const std::string& address) : library_(library) {
        info_ = find_infos(library_, "tcp", "127.0.0.1");
        fi_cq_attr queue{};
        queue.format = FI_CQ_FORMAT_DATA;
        fi_av_attr addresses{};
        addresses.type = FI_AV_TABLE;
        require(library_.open_fabric(info_->fabric_attr, &fabric_, nullptr));
        require(fi_domain(fabric_, info_, &domain_, nullptr));
        require(fi_cq_open(domain_, &queue, &completions_, nullptr));
        require(fi_av_open(domain_, &addresses, &addresses_, nullptr));
        require(fi_endpoint(domain_, info_, &endpoint_, nullptr));
        require(fi_ep_bind(endpoint_, &completions_->fid, FI_TRANSMIT | FI_RECV));
        require(fi_ep_bind(endpoint_, &addresses_->fid, 0));
        require(fi_enable(endpoint_));
        if (fi_av_insert(addresses_, address.data(), 1, &to_, 0, nullptr) != 1) exit(2);
    }

    void write(uint64_t key, uint64_t bytes) {
        post([&] { return fi_writedata(endpoint_, bytes_, bytes, nullptr, 7, to_, 0, key, this); });
    }
    void send(const std::string& message) {
        message.copy(bytes_, sizeof(bytes_));
        post([&] { return fi_senddata(endpoint_, bytes_, message.size(), nullptr, 7, to_, this); });
    }
    uint32_t num_done() const { return num_done_; }

private:
    void require(int64_t result) const { library_.require(result, "stranger"); }

    // One at a time: what is refused takes the connection with it.
    template <class Post>
    void post(Post post) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
        bool is_posted = false, has_ended = false;
        while (!has_ended && std::chrono::steady_clock::now() < until) {
            if (!is_posted) is_posted = post() == 0;
            fi_cq_data_entry entry;
            const ssize_t count = fi_cq_read(completions_, &entry, 1);
            num_done_ += count == 1;
            fi_cq_err_entry error{};
            has_ended = count == 1 || (count == -FI_EAVAIL && fi_cq_readerr(completions_, &error, 0) == 1);
        }
    }

    const FabricLibrary library_;
    fi_info* info_ = nullptr;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* completions_ = nullptr;
    fid_av* addresses_ = nullptr;
    fid_ep* endpoint_ = nullptr;
    fi_addr_t to_ = FI_ADDR_UNSPEC;
    char bytes_[kMaxMessageBytes] = "stranger";
    uint32_t num_done_ = 0;
};

std::string from_digits(const std::string& digits) {
    std::string bytes;
    for (size_t at = 0; at + 1 < digits.size(); at += 2) {
        bytes.push_back(static_cast<char>(std::stoul(digits.substr(at, 2), nullptr, 16)));
    }
    return bytes;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "fabric_stranger LIBRARY ADDRESS KEYS\n");
        return 2;
    }
    Stranger stranger(argv[1], from_digits(argv[2]));
    for (uint64_t key = 0; key < std::stoull(argv[3]); ++key) {
        stranger.write(key, 8);
        stranger.write(key, 0);
    }
    for (uint32_t i = 0; i < kNumMessages; ++i) {
        Message message{MessageKind::payload, 1, 0, i, 2, 5, i};
        message.addresses = {{from_digits(argv[2])}};
        message.payload = "hello";
        stranger.send(i % 2 ? pack(message) : "nonsense");
    }
    printf("%u\n", stranger.num_done());
    return 0;
}
