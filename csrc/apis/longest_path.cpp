// Longest paths through the graph of a run, as tracekern/analysis/graph/longest_path.py calls them. That file says what
// is meant, and has the same in Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <string>
#include <vector>

#include "apis/register.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

template <class T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

class LongestPath {
public:
    LongestPath(int64_t num_nodes, const Column<int32_t>& source, const Column<int32_t>& target)
        : num_nodes_(num_nodes) {
        const py::ssize_t num_edges = source.size();
        if (target.size() != num_edges) throw py::value_error("source and target differ in length");
        if (num_nodes < 1 || num_nodes > std::numeric_limits<int32_t>::max())
            throw py::value_error("wanted 1 to 2^31 - 1 nodes, got " + std::to_string(num_nodes));
        for (py::ssize_t edge = 0; edge < num_edges; ++edge) {
            const int32_t from = source.data()[edge], to = target.data()[edge];
            if (from < 0 || to < 0 || from >= num_nodes || to >= num_nodes)
                throw py::index_error("edge " + std::to_string(edge) + " names a node that is not there");
        }
        py::gil_scoped_release release;
        order_edges(source.data(), target.data(), static_cast<size_t>(num_edges));
    }

    bool is_cyclic() const { return num_ordered_ < num_nodes_; }

    py::tuple run(const Column<double>& weight) const {
        if (static_cast<size_t>(weight.size()) != edges_.size() && !is_cyclic())
            throw py::value_error("wanted a weight for each edge");
        py::array_t<double> time(num_nodes_);
        py::array_t<int32_t> deciding(num_nodes_);
        double* times = time.mutable_data();
        int32_t* decides = deciding.mutable_data();
        const double* weights = weight.data();
        py::gil_scoped_release release;
        std::fill_n(times, num_nodes_, -std::numeric_limits<double>::infinity());
        std::fill_n(decides, num_nodes_, -1);
        times[0] = 0.0;
        for (const Edge& edge : edges_) {
            const double reached = times[edge.source] + weights[edge.number];
            if (reached > times[edge.target]) {
                times[edge.target] = reached;
                decides[edge.target] = edge.number;
            }
        }
        py::gil_scoped_acquire acquire;
        return py::make_tuple(time, deciding);
    }

private:
    struct Edge {
        int32_t number, source, target;
    };

    // Sorts nodes so that each comes after all that lead to it, and edges by their targets in that order.
    void order_edges(const int32_t* source, const int32_t* target, size_t num_edges) {
        std::vector<int32_t> first_out(num_nodes_ + 1), first_in(num_nodes_ + 1);
        for (size_t edge = 0; edge < num_edges; ++edge) {
            ++first_out[source[edge] + 1];
            ++first_in[target[edge] + 1];
        }
        std::vector<int32_t> num_missing(num_nodes_);
        for (int64_t node = 0; node < num_nodes_; ++node) {
            num_missing[node] = first_in[node + 1];
            first_out[node + 1] += first_out[node];
            first_in[node + 1] += first_in[node];
        }
        std::vector<int32_t> outgoing(num_edges), incoming(num_edges);
        std::vector<int32_t> next_out(first_out), next_in(first_in);
        for (size_t edge = 0; edge < num_edges; ++edge) {
            outgoing[next_out[source[edge]]++] = static_cast<int32_t>(edge);
            incoming[next_in[target[edge]]++] = static_cast<int32_t>(edge);
        }
        std::vector<int32_t> ready;  // a stack: nodes of one run follow each other, and lie side by side in memory
        for (int64_t node = 0; node < num_nodes_; ++node)
            if (num_missing[node] == 0) ready.push_back(static_cast<int32_t>(node));
        edges_.reserve(num_edges);
        for (; !ready.empty(); ++num_ordered_) {
            const int32_t node = ready.back();
            ready.pop_back();
            for (int32_t i = first_in[node]; i < first_in[node + 1]; ++i)
                edges_.push_back({incoming[i], source[incoming[i]], node});
            for (int32_t i = first_out[node]; i < first_out[node + 1]; ++i)
                if (--num_missing[target[outgoing[i]]] == 0) ready.push_back(target[outgoing[i]]);
        }
    }

    int64_t num_nodes_;
    int64_t num_ordered_ = 0;
    std::vector<Edge> edges_;
};

}  // namespace

void register_longest_path(py::module_& module) {
    py::class_<LongestPath>(module, "LongestPath")
        .def(py::init<int64_t, const Column<int32_t>&, const Column<int32_t>&>(),
             py::arg("num_nodes"),
             py::arg("source"),
             py::arg("target"))
        .def_property_readonly("is_cyclic", &LongestPath::is_cyclic)
        .def("run", &LongestPath::run, py::arg("weight"));
}

}  // namespace tracekern
