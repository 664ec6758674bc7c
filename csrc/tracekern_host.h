/* Records of a host without Python, such as ranks of mpirun: C functions that open this rank's segment and say of each
 * launch what its kernel records. Compile tracekern_host.cpp (C++17, nothing is linked) into the program.
 *
 *   tk_host* host = tk_host_open(&options);                        // NULL: tk_host_error() says why; all runs untraced
 *   const uint64_t trace = tk_host_launch(host, &kernel, epoch);   // for with_recorder() of tracekern.h
 *   ...                                                            // launch the kernel, wait for all of them
 *   tk_host_close(host);
 *
 * Then `tracekern salvage RUN` writes what all ranks of this machine recorded into the capture's directory, also of
 * those that died. Members that are 0 or NULL take what is in parentheses; lists of names are words with a space in
 * between. Calls from several threads wait for each other. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tk_host tk_host;

/* Whose ranks kernels count, where these are some of the run's: their number is what its kernels call a rank. */
typedef struct tk_host_group {
    const char* name;      /* (none) */
    uint32_t generation;   /* which of the communicators that the program makes of these ranks, one after the other */
    const uint32_t* ranks; /* of the run */
    uint32_t num_ranks;
} tk_host_group;

typedef struct tk_host_options {
    const char* directory; /* of the capture, the same on all ranks */
    const char* run;       /* the same on all ranks, and none had it before: letters, digits, '-' and '_' */
    uint32_t rank;
    uint32_t num_ranks;         /* (1) */
    uint64_t max_bytes;         /* of shared memory for this rank's records, taken as they come (64 MiB) */
    uint32_t records_per_track; /* (1024) */
    uint32_t max_launches;      /* (4096) */
    const char* stages;         /* names of kernels in fault records, from CommArgs::first_stage 0 on (none) */
    const char* channels;       /* names of channels there, from kFirstOwnChannel on (none) */
    const tk_host_group* group; /* of fault records, and of kernels that name none (all of the run) */
    /* A GPU. NULL: the kernels run on the CPU backend, with the host's clock. */
    const char* device;   /* its name */
    const char* clock_id; /* equal for ranks of one GPU, such as its UUID */
    uint32_t clock_step;  /* ns by which its clock goes on (32) */
} tk_host_options;

typedef struct tk_host_kernel {
    const char* name; /* at most 95 bytes */
    uint32_t blocks;
    uint32_t warps;     /* of a block */
    const char* events; /* what describe_events() returns */
    const char* roles;  /* (none) */
    const char* key;    /* of this launch: a layer, a step (none) */
    int64_t stream;
    const tk_host_group* group; /* (that of the options) */
} tk_host_kernel;

tk_host* tk_host_open(const tk_host_options* options);

/* What with_recorder() takes; 0 where there is no room, which the dump counts, or no host. Call it right before the
 * launch. The number is valid until tk_host_close(). */
uint64_t tk_host_launch(tk_host* host, const tk_host_kernel* kernel, uint32_t epoch);

/* The memory that kernels write to, of whole pages, which takes all of max_bytes; NULL without room for it. A GPU's
 * host lets the device write there first (cudaHostRegister), and the address has to be the same on the device. */
void* tk_host_memory(tk_host* host, uint64_t* num_bytes);

/* For CommArgs::fault: where the first wait that gives up says what it waited for. */
void* tk_host_fault(tk_host* host);

/* A clock sample of a GPU; the host's clock is sampled by open and close. rounds are counted from 0 on all ranks.
 * initiator == responder: t1 = t2 is the device's clock, read between t0 and t3 of CLOCK_MONOTONIC. Else a round trip
 * of two GPUs: sent and received at t0 and t3 of the initiator's clock, answered at t1 = t2 of the other's. GPUs are
 * put on one time axis by round trips of two rounds or more, best before the first launch and behind the last. */
void tk_host_clock_sample(tk_host* host,
                          uint32_t round,
                          uint32_t initiator,
                          uint32_t responder,
                          int64_t t0,
                          int64_t t1,
                          int64_t t2,
                          int64_t t3);

/* After the last kernel has ended. */
void tk_host_close(tk_host* host);

/* One line: why the last tk_host_open() of this thread returned NULL. */
const char* tk_host_error(void);

#ifdef __cplusplus
}
#endif
