// A queue that many threads put into and one takes out of, without a lock.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace tracekern {

template <class Item>
class Queue {
public:
    Queue() = default;
    Queue(const Queue&) = delete;
    ~Queue() {
        while (take()) {
        }
    }

    // Any thread. Release: who takes the item sees all that was written before. Sequentially consistent for has_new():
    // who puts, then asks whether the taker sleeps, and who says that it sleeps, then asks whether there is something,
    // do not miss each other.
    void put(Item item) {
        auto* node = new Node{std::move(item), last_.load(std::memory_order_relaxed)};
        while (!last_.compare_exchange_weak(node->next, node, std::memory_order_seq_cst, std::memory_order_relaxed)) {
        }
    }

    // Something was put since take() found nothing. Any thread.
    bool has_new() const { return last_.load(std::memory_order_seq_cst) != nullptr; }

    // The oldest item; nullptr: none. One thread.
    std::unique_ptr<Item> take() {
        if (!first_ && has_new()) {
            // They hang together newest first.
            for (Node* node = last_.exchange(nullptr, std::memory_order_acquire); node;) {
                Node* older = std::exchange(node->next, first_);
                first_ = std::exchange(node, older);
            }
        }
        if (!first_) return nullptr;
        const std::unique_ptr<Node> node(std::exchange(first_, first_->next));
        return std::make_unique<Item>(std::move(node->item));
    }

private:
    struct Node {
        Item item;
        Node* next;
    };
    std::atomic<Node*> last_ = nullptr;
    Node* first_ = nullptr;  // the taker's
};

}  // namespace tracekern
