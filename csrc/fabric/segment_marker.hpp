// Says whose an endpoint of libfabric's shm is: a file beside its segment, under a lock for as long as its engine is
// there. An engine that starts removes segments whose marker nobody holds (tracekern/fabric/stale.py): their names say
// nothing of processes in another namespace.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <string>

#include "fabric/forks.hpp"

namespace tracekern {

class SegmentMarker {
public:
    // address: "fi_shm://SEGMENT\0". Without a marker the segment stays where its process is killed, and no more.
    explicit SegmentMarker(const std::string& address) {
        const std::string segment = address.substr(address.rfind('/') + 1, address.size() - address.rfind('/') - 2);
        path_ = "/dev/shm/" + segment + ".tracekern";
        const std::string partial = path_ + ".partial";
        file_ = open(partial.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (file_ < 0) return;
        // Nobody sees it before it is locked.
        if (flock(file_, LOCK_EX | LOCK_NB) != 0 || rename(partial.c_str(), path_.c_str()) != 0)
            unlink(partial.c_str());
        ClosedInChildren::add(file_);  // which would hold the lock, too
    }
    SegmentMarker(const SegmentMarker&) = delete;
    ~SegmentMarker() {
        if (file_ < 0) return;
        unlink(path_.c_str());
        ClosedInChildren::remove(file_);
        close(file_);
    }

private:
    std::string path_;
    int file_ = -1;
};

}  // namespace tracekern
