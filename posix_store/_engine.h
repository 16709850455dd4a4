/* Moves one batch of blocks between memory and files, without Python.
 *
 * A batch is cut into pieces of neighbouring blocks. The calling thread and the threads of a pool take one
 * piece after the other, and each moves it with few vectored calls. A checksum is computed chunk by chunk, just
 * before or after the kernel touches the chunk, so that it is in the cache of the core.
 */
#ifndef POSIX_STORE_ENGINE_H
#define POSIX_STORE_ENGINE_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "_crc32c.h"

enum { MAX_IOV = 1024, RECORD = 64, MAX_THREADS = 64 };

/* As in posix_store.errors.Reason. */
enum reason { OK = 0, LENGTH = 3, CHECKSUM = 4, IO_ERROR = 5, TIMEOUT = 6, EVICTED = 8, FULL = 9, READ_ONLY = 10 };

/* How the operating system is called; tests put something else in the place of libc. Each returns what the
 * system call does, or minus its errno. */
struct calls {
    ssize_t (*preadv)(void *context, int fd, const struct iovec *iov, int count, int64_t offset);
    ssize_t (*pwritev)(void *context, int fd, const struct iovec *iov, int count, int64_t offset);
    ssize_t (*pwrite)(void *context, int fd, const void *data, size_t length, int64_t offset);
    int64_t (*seek_hole)(void *context, int fd, int64_t offset);
    int64_t (*links)(void *context, int fd);
    void *context;
};

/* The end of a journal. All appends go through `journal_append`, whoever makes them. */
struct journal {
    int64_t end;
    int32_t fd;
    int32_t broken; /* an append failed: nothing may follow what it may have left */
    int32_t busy;
};

struct batch {
    int64_t count, components, length; /* blocks; parts of each; bytes of each block */
    const int64_t *addresses;          /* (count, components) */
    const int64_t *sizes;              /* (components) */
    const int32_t *fds;                /* (count) */
    const int64_t *offsets;            /* (count) */
    uint32_t *crc;                     /* (count): expected when reading, computed when writing */
    uint8_t *status;                   /* (count): a reason for each block */
    int64_t piece_bytes;               /* about what a thread takes at a time */
    int64_t chunk_bytes;               /* what one system call moves at most */
    double deadline;                   /* seconds of CLOCK_MONOTONIC */
    int writes, checks, finds_holes;
    const struct calls *calls;
    int error; /* first errno */
    /* working state */
    struct place *places; /* blocks in the order of their files */
    int64_t *pieces;      /* first place of each piece, and the end */
    int64_t piece_count, next_piece;
};

struct place {
    int64_t offset, block;
    int fd;
};

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static uint8_t reason_of(int error) {
    switch (error) {
    case ENOSPC:
    case EDQUOT: return FULL;
    case EROFS: return READ_ONLY;
    case ENOENT:
    case ESTALE: return EVICTED;
    case ETIMEDOUT: return TIMEOUT;
    default: return IO_ERROR;
    }
}

/* ---- One piece ---- */

/* Where a piece stands: `part` is a component of the block at `place`, of which `within` bytes are done. */
struct cursor {
    int64_t place, part, within, done_in_block;
    uint32_t crc;
};

/* Fills iovecs from the cursor on; returns how many. Adjacent memory becomes one. */
static int fill_iov(const struct batch *b, struct cursor at, int64_t last, int64_t limit, struct iovec *iov) {
    int count = 0;
    int64_t bytes = 0;
    while (at.place < last && bytes < limit) {
        const int64_t *row = b->addresses + b->places[at.place].block * b->components;
        for (; at.part < b->components && bytes < limit; at.part++, at.within = 0) {
            char *base = (char *)(intptr_t)row[at.part] + at.within;
            int64_t size = b->sizes[at.part] - at.within;
            if (size > limit - bytes) size = limit - bytes;
            if (count && (char *)iov[count - 1].iov_base + iov[count - 1].iov_len == base) {
                iov[count - 1].iov_len += (size_t)size;
            } else if (count == MAX_IOV) {
                return count;
            } else {
                iov[count].iov_base = base;
                iov[count++].iov_len = (size_t)size;
            }
            bytes += size;
            if (size < b->sizes[at.part] - at.within) return count;
        }
        at.place++, at.part = 0;
    }
    return count;
}

static void block_done(struct batch *b, struct cursor *at) {
    int64_t block = b->places[at->place].block;
    if (b->checks && b->writes) b->crc[block] = at->crc;
    if (b->checks && !b->writes && at->crc != b->crc[block]) b->status[block] = CHECKSUM;
    at->place++;
    at->part = at->within = at->done_in_block = 0;
    at->crc = 0;
}

static void skip_block(struct batch *b, struct cursor *at, uint8_t reason) {
    b->status[b->places[at->place].block] = reason;
    at->place++;
    at->part = at->within = at->done_in_block = 0;
    at->crc = 0;
}

/* Accounts for bytes that were moved, and takes their checksum. */
static void advance(struct batch *b, struct cursor *at, int64_t moved) {
    while (moved > 0) {
        int64_t left = b->sizes[at->part] - at->within;
        int64_t size = left < moved ? left : moved;
        if (b->checks) {
            int64_t address = b->addresses[b->places[at->place].block * b->components + at->part];
            at->crc = crc32c_update(at->crc, (const char *)(intptr_t)address + at->within, (size_t)size);
        }
        at->within += size;
        at->done_in_block += size;
        moved -= size;
        if (at->within == b->sizes[at->part]) at->part++, at->within = 0;
        if (at->part == b->components) block_done(b, at);
    }
}

static void fail_rest(struct batch *b, struct cursor *at, int64_t last, uint8_t reason) {
    while (at->place < last) skip_block(b, at, reason);
}

static void move_piece(struct batch *b, int64_t first, int64_t last) {
    struct iovec iov[MAX_IOV];
    const struct calls *calls = b->calls;
    struct cursor at = {first, 0, 0, 0, 0};
    int fd = b->places[first].fd;
    while (at.place < last) {
        if (seconds_now() > b->deadline) {
            fail_rest(b, &at, last, TIMEOUT);
            break;
        }
        int64_t offset = b->places[at.place].offset + at.done_in_block;
        int count = fill_iov(b, at, last, b->chunk_bytes, iov);
        struct cursor after = at;
        int64_t length = 0;
        for (int i = 0; i < count; i++) length += (int64_t)iov[i].iov_len;
        /* Before writing: then the kernel, which holds a lock of the file while it copies, finds it in the cache. */
        if (b->writes) advance(b, &after, length);
        ssize_t moved = (b->writes ? calls->pwritev : calls->preadv)(calls->context, fd, iov, count, offset);
        if (moved == length && b->writes) {
            at = after;
        } else if (moved > 0) {
            advance(b, &at, moved);
        } else if (moved == 0) {
            fail_rest(b, &at, last, b->writes ? IO_ERROR : LENGTH);
        } else {
            int none = 0;
            __atomic_compare_exchange_n(&b->error, &none, (int)-moved, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
            skip_block(b, &at, reason_of((int)-moved));
        }
    }
}

static void take_pieces(struct batch *b) {
    for (;;) {
        int64_t piece = __atomic_fetch_add(&b->next_piece, 1, __ATOMIC_RELAXED);
        if (piece >= b->piece_count) return;
        move_piece(b, b->pieces[piece], b->pieces[piece + 1]);
    }
}

/* ---- Planning ---- */

static int by_place(const void *a, const void *b) {
    const struct place *x = a, *y = b;
    if (x->fd != y->fd) return x->fd < y->fd ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->block < y->block ? -1 : x->block > y->block;
}

/* Puts blocks into the order of their files and cuts them into pieces. 0 when there is no memory for it. */
static int make_plan(struct batch *b) {
    int64_t n = b->count;
    b->places = malloc((size_t)n * sizeof *b->places + (size_t)(n + 1) * sizeof *b->pieces);
    if (!b->places) return 0;
    b->pieces = (int64_t *)(b->places + n);
    int sorted = 1;
    for (int64_t i = 0; i < n; i++) {
        b->places[i] = (struct place){b->offsets[i], i, b->fds[i]};
        if (i && by_place(&b->places[i - 1], &b->places[i]) > 0) sorted = 0;
    }
    if (!sorted) qsort(b->places, (size_t)n, sizeof *b->places, by_place);
    b->piece_count = 0;
    int64_t bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        const struct place *here = b->places + i, *before = here - 1;
        int joins = i && here->fd == before->fd && here->offset == before->offset + b->length;
        if (!joins || bytes + b->length > b->piece_bytes) b->pieces[b->piece_count++] = i, bytes = 0;
        bytes += b->length;
    }
    b->pieces[b->piece_count] = n;
    return 1;
}

/* ---- Threads ---- */

/* Batches in progress. Each member thread and the owner hold a reference; the last one frees it. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    struct job *jobs;
    int threads, started, references, closing;
    pid_t owner; /* a forked child has none of the threads, and maybe a lock that nobody will let go of */
};

struct job {
    struct batch *batch;
    struct job *next;
    int helpers; /* threads that are at work on it */
};

static void pool_unlock_and_leave(struct pool *pool) {
    int last = --pool->references == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last) {
        pthread_mutex_destroy(&pool->lock);
        pthread_cond_destroy(&pool->work);
        pthread_cond_destroy(&pool->idle);
        free(pool);
    }
}

static struct job *job_with_pieces(struct pool *pool) {
    for (struct job *job = pool->jobs; job; job = job->next)
        if (__atomic_load_n(&job->batch->next_piece, __ATOMIC_RELAXED) < job->batch->piece_count) return job;
    return NULL;
}

static void *pool_thread(void *argument) {
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    while (!pool->closing) {
        struct job *job = job_with_pieces(pool);
        if (!job) {
            pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        job->helpers++;
        pthread_mutex_unlock(&pool->lock);
        take_pieces(job->batch);
        pthread_mutex_lock(&pool->lock);
        /* From here on the job may be gone as soon as the lock is let go of. */
        if (--job->helpers == 0) pthread_cond_broadcast(&pool->idle);
    }
    pool_unlock_and_leave(pool);
    return NULL;
}

static struct pool *pool_new(int threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pool->references = 1;
    pool->owner = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->idle, NULL);
    return pool;
}

static void pool_close(struct pool *pool) {
    if (pool->owner != getpid()) return;
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->work);
    pool_unlock_and_leave(pool);
}

/* The caller holds the lock. Best effort: with fewer threads a batch takes longer. */
static void pool_start(struct pool *pool, int wanted) {
    sigset_t all, before;
    if (wanted > pool->threads - 1) wanted = pool->threads - 1;
    if (pool->started >= wanted) return;
    /* Signals are for the threads of the engine that loaded us. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    while (pool->started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, pool_thread, pool)) break;
        pool->started++;
        pool->references++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A block is written whole and a hole is never filled: one in which there is a hole may have been read as zeros.
 * Asked when all is read, and once for all blocks before the next hole: some file systems walk every page up to it. */
static void refuse_holes(struct batch *b) {
    for (int64_t i = 0; i < b->count;) {
        int fd = b->places[i].fd;
        int64_t begin = b->places[i].offset;
        int64_t hole = b->calls->seek_hole(b->calls->context, fd, begin);
        int tells = hole >= 0 || hole == -ENXIO;
        if (tells && hole < begin) hole = begin; /* behind the end of the file */
        while (i < b->count && b->places[i].fd == fd && (!tells || b->places[i].offset + b->length <= hole)) i++;
        /* Those that begin before the hole and end behind it. What lies between blocks may be a hole. */
        for (; i < b->count && b->places[i].fd == fd && b->places[i].offset <= hole; i++) {
            uint8_t *status = b->status + b->places[i].block;
            if (*status == OK) *status = EVICTED;
        }
    }
}

/* Moves a batch. When it returns, no thread uses its memory any more. */
static void run_batch(struct pool *pool, struct batch *b) {
    if (!b->count) return;
    if (!make_plan(b)) {
        b->error = ENOMEM;
        memset(b->status, IO_ERROR, (size_t)b->count);
        return;
    }
    b->next_piece = 0;
    if (b->piece_count == 1 || pool->threads == 1 || pool->owner != getpid()) {
        take_pieces(b);
    } else {
        struct job job = {b, NULL, 0};
        pthread_mutex_lock(&pool->lock);
        pool_start(pool, (int)(b->piece_count < MAX_THREADS ? b->piece_count - 1 : MAX_THREADS));
        struct job **end = &pool->jobs;
        while (*end) end = &(*end)->next;
        *end = &job;
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
        take_pieces(b);
        pthread_mutex_lock(&pool->lock);
        struct job **link = &pool->jobs;
        while (*link != &job) link = &(*link)->next;
        *link = job.next;
        while (job.helpers) pthread_cond_wait(&pool->idle, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
    }
    if (b->finds_holes) refuse_holes(b);
    free(b->places);
}

/* ---- Journal ---- */

static void put_le(uint8_t *at, uint32_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

/* Fills `remaining` and `crc` of the records of one append (docs/FORMAT.md). */
static void seal_records(uint8_t *records, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t *record = records + i * RECORD;
        put_le(record + 54, (uint32_t)(count - 1 - i), 2);
        put_le(record + 60, crc32c_update(0, record, RECORD - 4), 4);
    }
}

/* Appends the records of one batch; 0, or an errno: then none of them will ever be visible. Waits for other
 * appends until `deadline`. */
static int journal_append(struct journal *journal, const struct calls *calls, uint8_t *records, int64_t count,
                          double deadline) {
    seal_records(records, count);
    const struct timespec pause = {0, 20000};
    while (__atomic_exchange_n(&journal->busy, 1, __ATOMIC_ACQUIRE)) {
        if (seconds_now() > deadline) return ETIMEDOUT;
        nanosleep(&pause, NULL);
    }
    int error = journal->broken ? EBADF : 0;
    int64_t length = count * RECORD, done = 0;
    while (!error && done < length) {
        ssize_t written = calls->pwrite(calls->context, journal->fd, records + done, (size_t)(length - done),
                                        journal->end + done);
        if (written <= 0) error = written ? (int)-written : EIO;
        else done += written;
    }
    if (!error) journal->end += length;
    else if (!journal->broken) journal->broken = 1;
    __atomic_store_n(&journal->busy, 0, __ATOMIC_RELEASE);
    return error;
}

/* ---- libc ---- */

#define UNTIL_NOT_INTERRUPTED(result, call) \
    do result = (call); \
    while (result < 0 && errno == EINTR)

static ssize_t libc_preadv(void *context, int fd, const struct iovec *iov, int count, int64_t offset) {
    ssize_t result;
    (void)context;
    UNTIL_NOT_INTERRUPTED(result, preadv(fd, iov, count, offset));
    return result < 0 ? -errno : result;
}

static ssize_t libc_pwritev(void *context, int fd, const struct iovec *iov, int count, int64_t offset) {
    ssize_t result;
    (void)context;
    UNTIL_NOT_INTERRUPTED(result, pwritev(fd, iov, count, offset));
    return result < 0 ? -errno : result;
}

static ssize_t libc_pwrite(void *context, int fd, const void *data, size_t length, int64_t offset) {
    ssize_t result;
    (void)context;
    UNTIL_NOT_INTERRUPTED(result, pwrite(fd, data, length, offset));
    return result < 0 ? -errno : result;
}

static int64_t libc_seek_hole(void *context, int fd, int64_t offset) {
    (void)context;
    int64_t hole = lseek(fd, offset, SEEK_HOLE);
    return hole < 0 ? -errno : hole;
}

static int64_t libc_links(void *context, int fd) {
    struct stat status;
    (void)context;
    return fstat(fd, &status) ? -errno : (int64_t)status.st_nlink;
}

static const struct calls libc_calls = {libc_preadv, libc_pwritev, libc_pwrite, libc_seek_hole, libc_links, NULL};

#endif
