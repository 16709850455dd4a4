/* Runs posix_store/_engine.h from several threads, without Python, for the sanitizers of threads and addresses.
 *
 *   native_driver DIRECTORY ROUNDS     0 and "all right", or 1 and what was not
 *
 * Each component is an allocation of its own, so that one byte too many is seen. Defends issue 4.
 */
#define _GNU_SOURCE
#include "_engine.h"

#include <fcntl.h>
#include <stdio.h>

enum { WORKERS = 4, BLOCKS = 24, COMPONENTS = 3 };

static const int64_t component_sizes[COMPONENTS] = {20001, 7, 3000};

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

/* ---- A set of blocks in memory and in one file ---- */

struct blocks {
    struct batch batch;
    int64_t addresses[BLOCKS * COMPONENTS], offsets[BLOCKS];
    int32_t fds[BLOCKS];
    uint32_t crc[BLOCKS];
    uint8_t status[BLOCKS];
    uint8_t *memory[BLOCKS * COMPONENTS];
};

static uint8_t byte_of(int seed, int part, int64_t at) { return (uint8_t)((seed * 31 + part) * 131 + at * 7); }

/* The blocks lie from `base` on, in an order of their own, every third behind a gap of one page. */
static void make_blocks(struct blocks *b, int fd, int64_t base) {
    memset(b, 0, sizeof *b);
    int64_t length = 0;
    for (int j = 0; j < COMPONENTS; j++) length += component_sizes[j];
    for (int i = 0; i < BLOCKS; i++) {
        int place = (i * 7) % BLOCKS;
        b->offsets[i] = base + place * length + place / 3 * 4096;
        b->fds[i] = fd;
    }
    for (int p = 0; p < BLOCKS * COMPONENTS; p++) {
        b->memory[p] = malloc((size_t)component_sizes[p % COMPONENTS]);
        CHECK(b->memory[p]);
        b->addresses[p] = (int64_t)(intptr_t)b->memory[p];
    }
    b->batch.count = BLOCKS, b->batch.components = COMPONENTS, b->batch.length = length;
    b->batch.addresses = b->addresses, b->batch.sizes = component_sizes, b->batch.fds = b->fds;
    b->batch.offsets = b->offsets, b->batch.crc = b->crc, b->batch.status = b->status;
    b->batch.piece_bytes = 64 << 10, b->batch.chunk_bytes = 50000;
}

static void free_blocks(struct blocks *b) {
    for (int p = 0; p < BLOCKS * COMPONENTS; p++) free(b->memory[p]);
}

static void fill(struct blocks *b, int seed) {
    for (int p = 0; p < BLOCKS * COMPONENTS; p++)
        for (int64_t at = 0; at < component_sizes[p % COMPONENTS]; at++) b->memory[p][at] = byte_of(seed, p, at);
}

static int block_is_right(const struct blocks *b, int block, int seed) {
    for (int p = block * COMPONENTS; p < (block + 1) * COMPONENTS; p++)
        for (int64_t at = 0; at < component_sizes[p % COMPONENTS]; at++)
            if (b->memory[p][at] != byte_of(seed, p, at)) return 0;
    return 1;
}

static void move(struct pool *pool, struct blocks *b, int writes, int checks, const struct calls *calls) {
    memset(b->status, OK, sizeof b->status);
    b->batch.writes = writes, b->batch.checks = checks, b->batch.finds_holes = !writes && !checks;
    b->batch.calls = calls;
    b->batch.deadline = seconds_now() + 60;
    b->batch.error = 0;
    run_batch(pool, &b->batch);
}

static int failed(const struct blocks *b) {
    int count = 0;
    for (int i = 0; i < BLOCKS; i++) count += b->status[i] != OK;
    return count;
}

static void forget(struct blocks *b) {
    for (int p = 0; p < BLOCKS * COMPONENTS; p++) memset(b->memory[p], 0, (size_t)component_sizes[p % COMPONENTS]);
}

/* ---- System calls with faults ---- */

struct faults {
    int64_t calls, every; /* the every-th call fails; 0: none */
    size_t most;          /* bytes that one call moves; 0: all */
};

static int cut(struct faults *faults, const struct iovec *iov, int count, struct iovec *out) {
    size_t left = faults->most;
    int used = 0;
    for (; used < count && left; used++) {
        out[used] = iov[used];
        if (out[used].iov_len > left) out[used].iov_len = left;
        left -= out[used].iov_len;
    }
    return used;
}

static int fails(struct faults *faults) {
    int64_t number = __atomic_add_fetch(&faults->calls, 1, __ATOMIC_RELAXED);
    return faults->every && number % faults->every == 0;
}

static ssize_t faulty_preadv(void *context, int fd, const struct iovec *iov, int count, int64_t offset) {
    struct iovec part[MAX_IOV];
    struct faults *faults = context;
    if (fails(faults)) return -EIO;
    return faults->most ? libc_calls.preadv(NULL, fd, part, cut(faults, iov, count, part), offset)
                        : libc_calls.preadv(NULL, fd, iov, count, offset);
}

static ssize_t faulty_pwritev(void *context, int fd, const struct iovec *iov, int count, int64_t offset) {
    struct iovec part[MAX_IOV];
    struct faults *faults = context;
    if (fails(faults)) return -ENOSPC;
    return faults->most ? libc_calls.pwritev(NULL, fd, part, cut(faults, iov, count, part), offset)
                        : libc_calls.pwritev(NULL, fd, iov, count, offset);
}

/* For every N and several lengths of calls: what is OK is right, and a failed call costs one block. */
static void with_faults(struct pool *pool, int fd, int64_t base) {
    static const size_t lengths[] = {0, 30000, 4999};
    struct blocks b;
    make_blocks(&b, fd, base);
    for (int length = 0; length < 3; length++) {
        for (int64_t every = 1; every < 12; every++) {
            struct faults faults = {0, every, lengths[length]}, none = {0, 0, 0};
            struct calls faulty = libc_calls, sound = libc_calls;
            faulty.preadv = sound.preadv = faulty_preadv, faulty.pwritev = sound.pwritev = faulty_pwritev;
            faulty.context = &faults, sound.context = &none;
            fill(&b, (int)every);
            move(pool, &b, 1, 1, &faulty);
            CHECK(failed(&b) == (faults.calls / every < BLOCKS ? faults.calls / every : BLOCKS));
            for (int i = 0; i < BLOCKS; i++) CHECK(b.status[i] == OK || b.status[i] == FULL);
            move(pool, &b, 1, 1, &sound);
            CHECK(failed(&b) == 0);
            forget(&b);
            faults.calls = 0;
            move(pool, &b, 0, 1, &faulty);
            CHECK(failed(&b) == (faults.calls / every < BLOCKS ? faults.calls / every : BLOCKS));
            for (int i = 0; i < BLOCKS; i++)
                CHECK(b.status[i] == OK ? block_is_right(&b, i, (int)every) : b.status[i] == IO_ERROR);
        }
    }
    free_blocks(&b);
}

/* ---- Threads ---- */

struct worker {
    pthread_t thread;
    struct pool *pool;
    struct journal *journal;
    int number, rounds, fd;
};

static void *work(void *argument) {
    struct worker *worker = argument;
    struct blocks b;
    int64_t base = (int64_t)worker->number << 24;
    make_blocks(&b, worker->fd, base);
    for (int round = 0; round < worker->rounds; round++) {
        fill(&b, worker->number + round);
        move(worker->pool, &b, 1, 1, &libc_calls);
        CHECK(failed(&b) == 0 && b.batch.error == 0);
        for (int checks = 0; checks < 2; checks++) {
            forget(&b);
            move(worker->pool, &b, 0, checks, &libc_calls);
            CHECK(failed(&b) == 0);
            for (int i = 0; i < BLOCKS; i++) CHECK(block_is_right(&b, i, worker->number + round));
        }
        int count = 1 + (worker->number + round) % 5;
        uint8_t *records = malloc((size_t)count * RECORD);
        CHECK(records);
        memset(records, worker->number + 1, (size_t)count * RECORD);
        CHECK(journal_append(worker->journal, &libc_calls, records, count, seconds_now() + 60) == 0);
        free(records);
    }
    free_blocks(&b);
    if (worker->number == 0) with_faults(worker->pool, worker->fd, base);
    return NULL;
}

/* Each append is whole: `remaining` counts down to zero within records of one worker. */
static void check_journal(const struct journal *journal, int64_t appends) {
    uint8_t record[RECORD];
    int64_t seen = 0, left = 0;
    uint8_t who = 0;
    for (int64_t at = 0; at < journal->end; at += RECORD) {
        CHECK(pread(journal->fd, record, RECORD, at) == RECORD);
        int remaining = record[54] | record[55] << 8;
        CHECK(left == 0 || (remaining == left - 1 && record[0] == who));
        left = remaining, who = record[0];
        seen += remaining == 0;
    }
    CHECK(left == 0 && seen == appends);
    CHECK(lseek(journal->fd, 0, SEEK_END) == journal->end);
}

/* What does not fill a file, and what comes too late. */
static void ends(struct pool *pool, int fd) {
    struct blocks b;
    make_blocks(&b, fd, (int64_t)WORKERS << 24);
    fill(&b, 1);
    move(pool, &b, 1, 1, &libc_calls);
    int64_t cut_at = b.offsets[5] + 100;
    CHECK(ftruncate(fd, cut_at) == 0);
    move(pool, &b, 0, 1, &libc_calls);
    for (int i = 0; i < BLOCKS; i++) CHECK(b.status[i] == (b.offsets[i] + b.batch.length <= cut_at ? OK : LENGTH));
    memset(b.status, OK, sizeof b.status);
    b.batch.deadline = seconds_now() - 1;
    run_batch(pool, &b.batch);
    for (int i = 0; i < BLOCKS; i++) CHECK(b.status[i] == TIMEOUT);
    free_blocks(&b);
}

static int open_in(const char *directory, const char *name) {
    char path[4096];
    CHECK(snprintf(path, sizeof path, "%s/%s", directory, name) < (int)sizeof path);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    return fd;
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    int fd = open_in(arguments[1], "segment"), rounds = atoi(arguments[2]);
    struct journal journal = {0};
    journal.fd = open_in(arguments[1], "journal");
    struct worker workers[WORKERS];
    for (int generation = 0; generation < 3; generation++) { /* a pool is closed while its threads come to rest */
        struct pool *pool = pool_new(1 + generation * 2);
        CHECK(pool);
        for (int i = 0; i < WORKERS; i++) {
            workers[i] = (struct worker){0, pool, &journal, i, rounds, fd};
            CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
        }
        for (int i = 0; i < WORKERS; i++) CHECK(pthread_join(workers[i].thread, NULL) == 0);
        ends(pool, fd);
        pool_close(pool);
    }
    check_journal(&journal, (int64_t)3 * WORKERS * rounds);
    for (int i = 0; i < 50; i++) { /* closed at once, or just after the first batch */
        struct pool *pool = pool_new(4);
        CHECK(pool);
        if (i % 2) ends(pool, fd);
        pool_close(pool);
    }
    puts("all right");
    return 0;
}
