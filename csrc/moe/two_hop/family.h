// What others may know of the two-hop family: moe/pipeline.hpp says what each member is for.
#pragma once

#include <stdexcept>
#include <vector>

#include "moe/config.h"
#include "moe/kernel_list.h"
#include "moe/two_hop/combine.h"
#include "moe/two_hop/dispatch.h"
#include "moe/two_hop/notify.h"
#include "moe/two_hop/one_node.h"
#include "trace/trace_choice.h"

namespace tracekern {

enum class TwoHopVariant : uint32_t { two_hop };
inline constexpr const char* kTwoHopVariantNames[] = {"two_hop"};

struct TwoHopConfig : PipelineConfig<TwoHopVariant> {
    uint32_t num_nodes = 1;
    uint32_t channels = 1;
    uint32_t nvl_send = 1, nvl_recv = 1;    // tokens of a chunk, and slots of a ring, within a node
    uint32_t rdma_send = 1, rdma_recv = 1;  // likewise between nodes
    uint32_t fp8 = 0;                       // rows are of fp8, with a scale for each 128 values
    uint32_t peer_warps = 1;                // of a block that sends, for each peer, where there are several nodes
    CommandRing* commands = nullptr;        // of this rank's proxy, where nodes are hosts
    char* far_heap = nullptr;               // likewise

    NodeShape nodes() const { return {num_nodes, shape.num_ranks / num_nodes}; }
    RingSizes rings() const { return RingSizes::of(rdma_recv, rdma_send, nvl_recv, nvl_send, num_nodes); }
    RowLayout row() const {
        constexpr uint32_t kScaleGroup = 128;
        return fp8 ? RowLayout::of(shape.hidden, num_places(), shape.hidden / kScaleGroup, shape.topk)
                   : RowLayout::of(shape.row_bytes(), num_places(), 0, shape.topk);
    }
    // Of tokens that go where those of an earlier call went, without experts and weights.
    RowLayout cached_row() const { return RowLayout::of(row().hidden_bytes, num_places(), row().num_scales, 0); }
    // On the way back: bf16, and weights.
    RowLayout combine_row() const { return RowLayout::of(shape.row_bytes(), 0, 0, shape.topk); }
    // One node has no first hop.
    uint32_t num_places() const { return num_nodes == 1 ? 0 : nodes().peers; }
    TwoHopLayout layout() const {
        return TwoHopLayout::make(shape, nodes(), channels, rings(), row().bytes, combine_row().bytes);
    }

    // The grids that the kernels count on.
    void set_grid() {
        warps_per_block = num_nodes == 1 ? kMaxTeamWarps : kFirstReceiver + nodes().peers * peer_warps;
        num_blocks = 2 * channels;
        stage_blocks[static_cast<uint32_t>(TwoHopStage::notify_dispatch)] = 1 + num_nodes;
    }

    // What memory safety and the argument against circles rest on. least_slots: of a first-hop ring; tests try less.
    void check(uint32_t least_slots) const {
        const auto require = [](bool holds, const char* what) {
            if (!holds) throw std::invalid_argument(what);
        };
        require(num_nodes >= 1 && num_nodes <= kMaxTwoHopNodes && shape.num_ranks % num_nodes == 0,
                "nodes: wanted 1 to 16 that divide the ranks");
        const uint32_t peers = nodes().peers;
        require(peers == 1 || peers == 2 || peers == 4 || peers == 8, "ranks of a node: wanted 1, 2, 4 or 8");
        const uint32_t warps = kFirstReceiver + peers * peer_warps;
        require(peer_warps >= 1 && warps <= kMaxTeamWarps, "peer_warps: wanted 1 to 8 / ranks of a node");
        require(num_nodes <= warps, "peer_warps: wanted as many warps of a block as there are nodes, at least");
        require(channels >= 1 && channels <= kMaxTwoHopChannels, "channels: wanted 1 to 64");
        require(rdma_send >= 1 && rdma_recv % rdma_send == 0, "rdma_recv: wanted a multiple of rdma_send");
        require(rdma_recv >= least_slots, "rdma_recv: wanted at least rdma_send + 6");
        require(nvl_send >= 1 && nvl_recv >= nvl_send, "nvl_recv: wanted at least nvl_send");
        require(rdma_recv < 1 << 14 && nvl_recv < 1 << 14, "slots of a ring: wanted fewer than 2^14");
        require(shape.max_tokens + rdma_recv <= kMaxTwoHopTokens, "tokens: wanted fewer than 2^20 - 1 - rdma_recv");
        const uint64_t most_rows = uint64_t{shape.num_ranks} * shape.max_tokens;
        require(most_rows + nvl_recv <= kMaxTwoHopTokens, "rows for one rank: wanted fewer than 2^20 - 1 - nvl_recv");
        require(row().hidden_bytes % sizeof(Vector16) == 0, "hidden: wanted a multiple of 16 bytes");
        require(!fp8 || shape.hidden % 128 == 0, "hidden: wanted a multiple of 128 for fp8");
    }
};

// Comm: CommArgs, or FarArgs in tests.
template <class Comm>
struct TwoHopOn {
    using Args = TwoHopArgs<Comm>;
    using Config = TwoHopConfig;
    using Stage = TwoHopStage;
    using Variant = TwoHopVariant;
    using Event = TwoHopEvent;
    using Bodies = detail::EveryBody;

    static constexpr const char* kName = "two_hop";
    static constexpr auto& kVariantNames = kTwoHopVariantNames;
    static constexpr auto& kStageNames = kTwoHopStageNames;
    static constexpr auto& kRoleNames = kTwoHopRoleNames;
    static constexpr auto& kChannelNames = kTwoHopChannelNames;

    template <class Visit>
    static void visit_options(TwoHopConfig& config, Visit visit) {
        visit("num_nodes", config.num_nodes);
        visit("channels", config.channels);
        visit("nvl_send", config.nvl_send);
        visit("nvl_recv", config.nvl_recv);
        visit("rdma_send", config.rdma_send);
        visit("rdma_recv", config.rdma_recv);
        visit("fp8", config.fp8);
        visit("peer_warps", config.peer_warps);
    }

    static uint64_t heap_bytes(const TwoHopConfig& config) { return config.layout().total_bytes; }

    template <class F>
    static void with_kernels(const TwoHopConfig& config, F f) {
        if (config.num_nodes == 1) {
            f(KernelList<TwoHopNotifyDispatch<Comm>, TwoHopOneNodeDispatch<Comm>, TwoHopOneNodeCombine<Comm>>{});
        } else {
            f(KernelList<TwoHopNotifyDispatch<Comm>, TwoHopDispatch<Comm>, TwoHopCombine<Comm>>{});
        }
    }

    template <class Memory>
    static Args make_args(const TwoHopConfig& config, Memory& memory) {
        Args args{};
        if constexpr (kIsFar<Comm>) {
            if (config.shape.max_tokens > kMaxImmediateNumber) {
                throw std::invalid_argument("tokens: between hosts wanted fewer than 2^16");
            }
            args.comm.ring = config.commands;
            args.comm.far_heap = config.far_heap;
        }
        args.shape = config.shape;
        args.nodes = config.nodes();
        args.num_channels = config.channels;
        args.rings = config.rings();
        args.row = config.row();
        args.layout = config.layout();
        args.state = static_cast<TwoHopState*>(memory.allocate(sizeof(TwoHopState)));
        return args;
    }

    template <class Memory>
    static void reset(const Args& args, Memory& memory) {
        const TwoHopState state{{kFirstEpoch, {}}, {}, {}};
        memory.copy_to(args.state, &state, sizeof(state));
        const size_t count = (args.layout.flags_end - args.layout.flags_begin) / sizeof(uint64_t);
        const std::vector<uint64_t> flags(count, make_flag(kNeverEpoch, 0));
        const auto lower_flags = [&](char* heap) {
            memory.copy_to(heap + args.layout.flags_begin, flags.data(), count * sizeof(uint64_t));
        };
        lower_flags(args.comm.heap[args.comm.rank]);
        if constexpr (kIsFar<Comm>) lower_flags(args.comm.far_heap);
    }
};

using TwoHop = TwoHopOn<CommArgs>;

}  // namespace tracekern
