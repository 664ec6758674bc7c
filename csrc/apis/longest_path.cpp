// Longest paths through the graph of a run, as tracekern/analysis/graph/longest_path.py calls them. That file says what
// is meant, and has the same in Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apis/register.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

template <class T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
void check_range(const Column<T>& numbers, int64_t stop, const std::string& what) {
    for (py::ssize_t i = 0; i < numbers.size(); ++i)
        if (numbers.data()[i] < 0 || numbers.data()[i] >= stop)
            throw py::index_error(what + " " + std::to_string(numbers.data()[i]) + " is not there");
}

class LongestPath {
public:
    using Change = std::pair<Column<int64_t>, Column<double>>;

    LongestPath(int64_t num_nodes, const Column<int32_t>& source, const Column<int32_t>& target)
        : num_nodes_(num_nodes), num_edges_(source.size()) {
        if (target.size() != num_edges_) throw py::value_error("source and target differ in length");
        if (num_nodes < 1 || num_nodes > std::numeric_limits<int32_t>::max())
            throw py::value_error("wanted 1 to 2^31 - 1 nodes, got " + std::to_string(num_nodes));
        check_range(source, num_nodes, "node");
        check_range(target, num_nodes, "node");
        py::gil_scoped_release release;
        order_nodes(source.data(), target.data());
    }

    // How many nodes there are, and the order that was found, as arrays: what the other constructor takes.
    py::tuple order() const {
        const auto copied = [](const int32_t* from, size_t count) {
            py::array_t<int32_t> array(static_cast<py::ssize_t>(count));
            std::copy_n(from, count, array.mutable_data());
            return array;
        };
        return py::make_tuple(num_nodes_,
                              copied(order_.data(), order_.size()),
                              copied(first_in_.data(), first_in_.size()),
                              copied(reinterpret_cast<const int32_t*>(incoming_.data()), 2 * incoming_.size()));
    }

    explicit LongestPath(const py::tuple& order) : num_nodes_(order[0].cast<int64_t>()) {
        const auto [nodes, first_in, incoming] = std::array{
            order[1].cast<Column<int32_t>>(), order[2].cast<Column<int32_t>>(), order[3].cast<Column<int32_t>>()};
        num_edges_ = incoming.size() / 2;
        order_.assign(nodes.data(), nodes.data() + nodes.size());
        first_in_.assign(first_in.data(), first_in.data() + first_in.size());
        incoming_.resize(num_edges_);
        std::copy_n(incoming.data(), 2 * num_edges_, reinterpret_cast<int32_t*>(incoming_.data()));
        if (is_cyclic()) return;
        if (first_in.size() != num_nodes_ + 1 || first_in_.back() != num_edges_)
            throw py::value_error("these are no arrays of an order");
        check_range(nodes, num_nodes_, "node");
        check_range(incoming, std::max(num_nodes_, num_edges_), "node or edge");
    }

    bool is_cyclic() const { return static_cast<int64_t>(order_.size()) < num_nodes_; }

    py::tuple run(const Column<double>& weight) const {
        check_weights(weight);
        py::array_t<double> time(num_nodes_);
        py::array_t<int32_t> deciding(num_nodes_);
        double* times = time.mutable_data();
        int32_t* decides = deciding.mutable_data();
        const double* weights = weight.data();
        py::gil_scoped_release release;
        std::vector<double> reached(num_nodes_);  // in order
        for (int64_t place = 0; place < num_nodes_; ++place) {
            double latest = start_of(place);
            int32_t by = -1;
            for (int32_t i = first_in_[place]; i < first_in_[place + 1]; ++i) {
                const auto [edge, source] = incoming_[i];
                if (reached[source] + weights[edge] > latest) {
                    latest = reached[source] + weights[edge];
                    by = edge;
                }
            }
            reached[place] = times[order_[place]] = latest;
            decides[order_[place]] = by;
        }
        py::gil_scoped_acquire acquire;
        return py::make_tuple(time, deciding);
    }

    // [num_changes, num_wanted] times of some nodes, with `weight` but for the edges of each change.
    py::array_t<double> replay(const Column<double>& weight,
                               const std::vector<Change>& changes,
                               const Column<int64_t>& wanted) {
        check_weights(weight);
        check_range(wanted, num_nodes_, "node");
        for (const auto& [edges, weights] : changes) {
            if (edges.size() != weights.size()) throw py::value_error("edges and weights of a change differ in length");
            check_range(edges, num_edges_, "edge");
        }
        py::array_t<double> found({static_cast<py::ssize_t>(changes.size()), wanted.size()});
        double* out = found.mutable_data();
        if (!room_) room_ = std::make_unique<Room>(num_nodes_, num_edges_);
        Room& room = *room_;
        py::gil_scoped_release release;
        std::vector<int32_t> place_of(num_nodes_);
        for (int64_t place = 0; place < num_nodes_; ++place) place_of[order_[place]] = static_cast<int32_t>(place);
        for (size_t first = 0; first < changes.size(); first += kLanes) {
            const size_t count = std::min(kLanes, changes.size() - first);
            run_lanes(weight.data(), &changes[first], count, room);
            for (size_t lane = 0; lane < count; ++lane)
                for (py::ssize_t i = 0; i < wanted.size(); ++i) *out++ = room.times[place_of[wanted.data()[i]]][lane];
        }
        return found;
    }

private:
    struct Incoming {
        int32_t edge, source;  // a place
    };

    // So many replays share a pass: most of its time goes to finding the edges, and each takes 8 bytes a node.
    static constexpr size_t kLanes = 4;
    using Lanes = std::array<double, kLanes>;

    double start_of(int64_t place) const { return order_[place] == 0 ? 0.0 : -std::numeric_limits<double>::infinity(); }

    void check_weights(const Column<double>& weight) const {
        if (weight.size() != num_edges_) throw py::value_error("wanted a weight for each edge");
        if (is_cyclic()) throw py::value_error("nodes wait for each other: nothing can be said about them");
    }

    // What a pass works with, kept for all passes. The large arrays are numpy's, which asks the system for large pages.
    struct Room {
        py::array_t<double> for_times;
        py::array_t<int32_t> for_rows;
        Lanes* times;  // by place
        int32_t* row;  // by edge: of `weights`, for those that differ in any lane; else -1
        std::vector<Lanes> weights;

        Room(int64_t num_nodes, int64_t num_edges) : for_times(num_nodes * kLanes), for_rows(num_edges) {
            times = reinterpret_cast<Lanes*>(for_times.mutable_data());
            row = for_rows.mutable_data();
        }
    };

    // Finds the times of all nodes, with `count` changes side by side.
    void run_lanes(const double* weights, const Change* changes, size_t count, Room& room) const {
        std::fill_n(room.row, num_edges_, -1);
        room.weights.clear();
        size_t num_changed = 0;
        for (size_t lane = 0; lane < count; ++lane) num_changed += static_cast<size_t>(changes[lane].first.size());
        room.weights.reserve(num_changed);
        for (size_t lane = 0; lane < count; ++lane) {
            const int64_t* edges = changes[lane].first.data();
            for (py::ssize_t i = 0; i < changes[lane].first.size(); ++i) {
                int32_t& row = room.row[edges[i]];
                if (row < 0) {
                    row = static_cast<int32_t>(room.weights.size());
                    room.weights.emplace_back().fill(weights[edges[i]]);
                }
                room.weights[row][lane] = changes[lane].second.data()[i];
            }
        }
        for (int64_t place = 0; place < num_nodes_; ++place) {
            Lanes latest;
            latest.fill(start_of(place));
            for (int32_t i = first_in_[place]; i < first_in_[place + 1]; ++i) {
                const auto [edge, source] = incoming_[i];
                Lanes weight;
                if (room.row[edge] < 0) {
                    weight.fill(weights[edge]);
                } else {
                    weight = room.weights[room.row[edge]];
                }
                for (size_t lane = 0; lane < kLanes; ++lane)
                    latest[lane] = std::max(latest[lane], room.times[source][lane] + weight[lane]);
            }
            room.times[place] = latest;
        }
    }

    // Numbers by key: those of key k are item[first[k]] .. item[first[k + 1] - 1], ascending.
    struct Lists {
        std::vector<int32_t> first, item;

        Lists(const int32_t* key, int64_t num_keys, int64_t count) : first(num_keys + 2), item(count) {
            for (int64_t i = 0; i < count; ++i) ++first[key[i] + 2];
            for (int64_t k = 0; k < num_keys; ++k) first[k + 2] += first[k + 1];
            for (int64_t i = 0; i < count; ++i) item[first[key[i] + 1]++] = static_cast<int32_t>(i);
        }
    };

    // Sorts nodes so that each comes after all that lead to it.
    void order_nodes(const int32_t* source, const int32_t* target) {
        std::vector<int32_t> place_of(num_nodes_);
        const Lists in(target, num_nodes_, num_edges_);
        {
            const Lists out(source, num_nodes_, num_edges_);
            std::vector<int32_t> num_missing(num_nodes_);
            std::vector<int32_t> ready;  // a stack: nodes of one run follow each other, and lie side by side in memory
            for (int64_t node = 0; node < num_nodes_; ++node) {
                num_missing[node] = in.first[node + 1] - in.first[node];
                if (num_missing[node] == 0) ready.push_back(static_cast<int32_t>(node));
            }
            order_.reserve(num_nodes_);
            while (!ready.empty()) {
                const int32_t node = ready.back();
                ready.pop_back();
                place_of[node] = static_cast<int32_t>(order_.size());
                order_.push_back(node);
                for (int32_t i = out.first[node]; i < out.first[node + 1]; ++i)
                    if (--num_missing[target[out.item[i]]] == 0) ready.push_back(target[out.item[i]]);
            }
        }
        if (is_cyclic()) return;
        first_in_.reserve(num_nodes_ + 1);
        incoming_.reserve(num_edges_);
        for (const int32_t node : order_) {
            first_in_.push_back(static_cast<int32_t>(incoming_.size()));
            for (int32_t i = in.first[node]; i < in.first[node + 1]; ++i)
                incoming_.push_back({in.item[i], place_of[source[in.item[i]]]});
        }
        first_in_.push_back(static_cast<int32_t>(incoming_.size()));
    }

    int64_t num_nodes_, num_edges_;
    std::vector<int32_t> order_;     // the node at each place
    std::vector<int32_t> first_in_;  // by place, and where the last one's end
    std::vector<Incoming> incoming_;
    std::unique_ptr<Room> room_;
};

}  // namespace

void register_longest_path(py::module_& module) {
    py::class_<LongestPath>(module, "LongestPath")
        .def(py::init<int64_t, const Column<int32_t>&, const Column<int32_t>&>(),
             py::arg("num_nodes"),
             py::arg("source"),
             py::arg("target"))
        .def(py::pickle([](const LongestPath& path) { return path.order(); },
                        [](const py::tuple& order) { return std::make_unique<LongestPath>(order); }))
        .def_property_readonly("is_cyclic", &LongestPath::is_cyclic)
        .def("run", &LongestPath::run, py::arg("weight"))
        .def("replay", &LongestPath::replay, py::arg("weight"), py::arg("changes"), py::arg("wanted"));
}

}  // namespace tracekern
