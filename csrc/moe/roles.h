// The roles of a kernel as a table: what a role's rows in a trace are called, which warps have it, and what they do.
//
//   using Roles = RoleTable<WorkingBlocks,
//                           Role<P2PRole::count, CountBlock>,
//                           Role<P2PRole::send, FirstHalf, SendRows>,
//                           Role<P2PRole::receive, SecondHalf, ReceiveRows>>;
//
// Blocks are those whose halves share work, a type: index(warp) among them, and count(warp). Work is a type with
// run(context, share), which returns false where it gave up; what has none is done by the kernel's body. A warp may
// have several roles, as in a block of one warp. It does them in the order of the table, and its row has the name of
// the first.
#pragma once

#include <type_traits>

#include "platform/device.h"

namespace tracekern {

// One warp's part of items that many share: first, first + stride, ...
struct Share {
    uint32_t first;
    uint32_t stride;

    // Of items that all warps of the grid share. Neighbouring items go to different blocks.
    TK_DEVICE static Share of_all(const Warp& warp) {
        return {warp.warp * warp.num_blocks + warp.block, warp.num_warps * warp.num_blocks};
    }
};

// What a warp has of the work that blocks share half by half. A block of one warp has both halves.
struct OwnPart {
    bool in_first_half;
    bool in_second_half;
    Share share;  // of the items of its half

    // block: of num_blocks that share. Neighbouring items go to different blocks.
    TK_DEVICE static OwnPart of(const Warp& warp, uint32_t block, uint32_t num_blocks) {
        if (warp.num_warps == 1) return {true, true, {block, num_blocks}};
        const uint32_t num_first = warp.num_warps / 2;
        const bool in_first = warp.warp < num_first;
        const uint32_t index = in_first ? warp.warp : warp.warp - num_first;
        const uint32_t count = in_first ? num_first : warp.num_warps - num_first;
        return {in_first, !in_first, {index * num_blocks + block, count * num_blocks}};
    }
};

// Blocks of a table: all of them.
struct EveryBlock {
    TK_DEVICE static uint32_t index(const Warp& warp) { return warp.block; }
    TK_DEVICE static uint32_t count(const Warp& warp) { return warp.num_blocks; }
};

// Which warps have a role. What is no half is a type like these and stands before them: these do not ask whether the
// warp's block is one of those that share work, the kernel's body does.
struct FirstHalf {
    TK_DEVICE static bool has(const Warp&, const OwnPart& own) { return own.in_first_half; }
};
struct SecondHalf {
    TK_DEVICE static bool has(const Warp&, const OwnPart& own) { return own.in_second_half; }
};

struct AllWarps {
    TK_DEVICE static bool has(const Warp&, const OwnPart&) { return true; }
};

template <auto kRoleName, class RoleWarps, class RoleWork = void>
struct Role {
    static constexpr auto kName = kRoleName;
    using Warps = RoleWarps;
    using Work = RoleWork;
};

template <class Blocks, class... Roles>
class RoleTable {
public:
    TK_DEVICE explicit RoleTable(const Warp& warp)
        : warp_(warp), own_(OwnPart::of(warp, Blocks::index(warp), Blocks::count(warp))) {}
    // Of roles that all warps have: they share all items of each.
    TK_DEVICE RoleTable(const Warp& warp, Share share) : warp_(warp), own_{true, true, share} {}

    // The first role of this warp.
    TK_DEVICE auto name() const { return first_of<Roles...>(); }

    // Whether this warp has that role; that of a half, if its block is one of Blocks.
    template <auto kName>
    TK_DEVICE bool has() const {
        return ((Roles::kName == kName && Roles::Warps::has(warp_, own_)) || ...);
    }
    TK_DEVICE Share share() const { return own_.share; }

    // Does the work of this warp's roles, of those that have some; false as soon as one gave up.
    template <class Context>
    TK_DEVICE bool run(Context& context) const {
        return (run_if_own<Roles>(context) && ...);
    }

private:
    template <class First, class... Others>
    TK_DEVICE auto first_of() const {
        if constexpr (sizeof...(Others) == 0) {
            return First::kName;
        } else {
            return First::Warps::has(warp_, own_) ? First::kName : first_of<Others...>();
        }
    }

    template <class Own, class Context>
    TK_DEVICE bool run_if_own(Context& context) const {
        if constexpr (std::is_void_v<typename Own::Work>) {
            return true;
        } else {
            return !Own::Warps::has(warp_, own_) || Own::Work::run(context, own_.share);
        }
    }

    const Warp& warp_;
    const OwnPart own_;
};

}  // namespace tracekern
