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
    // do not miss each other. False: it is closed, and the item is left as it is.
    bool put(Item&& item) {
        auto node = std::make_unique<Node>(std::move(item), last_.load(std::memory_order_relaxed));
        do {
            if (node->next == &closed_) {
                item = std::move(node->item);
                return false;
            }
        } while (
            !last_.compare_exchange_weak(node->next, node.get(), std::memory_order_seq_cst, std::memory_order_relaxed));
        (void)node.release();
        return true;
    }

    // Something was put since take() found nothing. Any thread.
    bool has_new() const {
        const Node* last = last_.load(std::memory_order_seq_cst);
        return last && last != &closed_;
    }

    // False: there is something to take. Who takes.
    bool try_close() {
        Node* none = nullptr;
        return !first_ && last_.compare_exchange_strong(none, &closed_, std::memory_order_seq_cst);
    }

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
        Item item{};
        Node* next = nullptr;
    };
    Node closed_;  // is the last one once it is closed
    std::atomic<Node*> last_ = nullptr;
    Node* first_ = nullptr;  // the taker's
};

}  // namespace tracekern
