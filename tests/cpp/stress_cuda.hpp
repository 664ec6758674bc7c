// What the attacking programs share on a GPU: where the launches of a batch record.
#pragma once

#include <deque>

#include "platform/gpu_host.hpp"
#include "stress_common.hpp"

namespace tracekern {

// In host memory, so that what was written can be looked at without a copy.
class BatchRegions {
public:
    BatchRegions(const StressOptions& options, uint32_t num_blocks, uint32_t warps_per_block, size_t num_launches)
        : num_headers_(TraceRegion::num_headers(options, size_t{num_blocks} * warps_per_block)),
          num_records_(TraceRegion::num_records(options, size_t{num_blocks} * warps_per_block)),
          headers_(num_launches * num_headers_ * sizeof(TrackHeader) + 1),
          records_(num_launches * num_records_ * sizeof(WideRecord) + 1) {
        for (size_t launch = 0; launch < num_launches; ++launch) {
            regions_.emplace_back(options,
                                  num_blocks,
                                  warps_per_block,
                                  headers_.as<TrackHeader>() + launch * num_headers_,
                                  records_.as<WideRecord>() + launch * num_records_);
        }
    }
    TraceRegion& operator[](size_t launch) { return regions_[launch]; }

private:
    const size_t num_headers_, num_records_;
    const MappedMemory headers_, records_;
    std::deque<TraceRegion> regions_;
};

}  // namespace tracekern
