// Endpoints of this process that libfabric's shm must not be shown any more once they were closed: it looks up those of
// its own process in a list that it takes none out of (2.5), and ends the process at memory that is gone. It gives no
// name twice.
#pragma once

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>

namespace tracekern {

class ClosedHere {
public:
    // Nobody uses it meanwhile.
    static void close(fid_ep* endpoint, const std::string& name) {
        ClosedHere& all = get();
        const std::unique_lock lock(all.mutex_);
        fi_close(&endpoint->fid);
        all.names_.insert(name);
    }
    // Returns what use() does, or -FI_ENOTCONN where the endpoint of this name was closed.
    template <class Use>
    static int64_t use(const std::string& name, Use&& use) {
        ClosedHere& all = get();
        const std::shared_lock lock(all.mutex_);
        return all.names_.contains(name) ? -FI_ENOTCONN : use();
    }

private:
    static ClosedHere& get() {
        static auto* all = new ClosedHere;  // engines may end after what is static
        return *all;
    }

    std::shared_mutex mutex_;
    std::set<std::string> names_;
};

}  // namespace tracekern
