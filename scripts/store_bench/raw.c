/* The limit that stores are measured against: blocks to and from one file, as fast as a plain loop can.
 *
 * Each thread takes a contiguous part of the batch. Blocks that follow each other in the file go in one vectored
 * call, of `piece` bytes at most. With a checksum, the CRC-32C of what a call moves is taken right after its read or
 * before its write, while it is in the cache.
 * The second thread is kept between batches, so that making it costs nothing. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "_crc32c.h"

#define RAW_VECTORS 1024

typedef struct {
    int fd, writes, checks;
    int64_t first, last; /* blocks [first, last) */
    const int64_t *offsets;
    const uint64_t *addresses;
    int64_t block, piece;
    uint32_t *sums; /* of each block: compared after a read, set before a write */
    int error;
} part;

static int transfer(const part *work, struct iovec *vectors, int count, int64_t offset)
{
    while (count) {
        ssize_t done = work->writes ? pwritev(work->fd, vectors, count, offset) : preadv(work->fd, vectors, count, offset);
        if (done <= 0) {
            if (done < 0 && errno == EINTR)
                continue;
            return done ? errno : EIO;
        }
        offset += done;
        while (count && (size_t)done >= vectors->iov_len) {
            done -= vectors->iov_len;
            vectors++, count--;
        }
        if (done) {
            vectors->iov_base = (char *)vectors->iov_base + done;
            vectors->iov_len -= done;
        }
    }
    return 0;
}

/* How many blocks from `at` on follow each other in the file, `most` at most. */
static int64_t run_length(const part *work, int64_t at, int64_t most)
{
    int64_t count = 1;
    while (count < most && at + count < work->last &&
           work->offsets[at + count] == work->offsets[at + count - 1] + work->block)
        count++;
    return count;
}

/* One block larger than a piece. */
static int move_large(const part *work, int64_t at)
{
    uint32_t sum = 0;
    for (int64_t done = 0; done < work->block;) {
        int64_t size = work->block - done < work->piece ? work->block - done : work->piece;
        char *data = (char *)(uintptr_t)work->addresses[at] + done;
        struct iovec vector = {data, size};
        if (work->checks && work->writes)
            sum = crc32c_update(sum, data, size);
        int error = transfer(work, &vector, 1, work->offsets[at] + done);
        if (error)
            return error;
        if (work->checks && !work->writes)
            sum = crc32c_update(sum, data, size);
        done += size;
    }
    if (work->writes)
        work->sums[at] = sum;
    return !work->checks || work->sums[at] == sum ? 0 : EBADMSG;
}

static int move_blocks(const part *work)
{
    struct iovec vectors[RAW_VECTORS];
    int64_t group = work->piece / work->block < RAW_VECTORS ? work->piece / work->block : RAW_VECTORS;
    int error = 0;
    for (int64_t at = work->first; at < work->last && !error;) {
        if (group < 1) {
            error = move_large(work, at++);
            continue;
        }
        int64_t count = run_length(work, at, group);
        for (int64_t i = at; i < at + count; i++) {
            void *data = (void *)(uintptr_t)work->addresses[i];
            vectors[i - at] = (struct iovec){data, work->block};
            if (work->checks && work->writes)
                work->sums[i] = crc32c_update(0, data, work->block);
        }
        error = transfer(work, vectors, count, work->offsets[at]);
        for (int64_t i = at; i < at + count && work->checks && !work->writes && !error; i++)
            if (work->sums[i] != crc32c_update(0, (void *)(uintptr_t)work->addresses[i], work->block))
                error = EBADMSG;
        at += count;
    }
    return error;
}

static void move(part *work) { work->error = move_blocks(work); }

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static part *given; /* to the second thread; NULL when it has done it */

static void *second_thread(void *unused)
{
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!given)
            pthread_cond_wait(&changed, &mutex);
        part *work = given;
        pthread_mutex_unlock(&mutex);
        move(work);
        pthread_mutex_lock(&mutex);
        given = NULL;
        pthread_cond_broadcast(&changed);
    }
    return unused;
}

static int second_is_there(void)
{
    static int there;
    pthread_t thread;
    if (!there && !pthread_create(&thread, NULL, second_thread, NULL))
        there = !pthread_detach(thread);
    return there;
}

/* Moves `count` blocks; 0 or an errno (EBADMSG: a checksum differs). Not for several threads at once. */
int raw_move(int fd, int writes, int checks, int threads, int64_t piece, int64_t count, int64_t block,
             const int64_t *offsets, const uint64_t *addresses, uint32_t *sums)
{
    part mine = {fd, writes, checks, 0, count, offsets, addresses, block, piece, sums, 0}, other = mine;
    if (threads < 2 || count < 2 || !second_is_there()) {
        move(&mine);
        return mine.error;
    }
    mine.last = other.first = count / 2;
    pthread_mutex_lock(&mutex);
    given = &other;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    move(&mine);
    pthread_mutex_lock(&mutex);
    while (given)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    return mine.error ? mine.error : other.error;
}

const char *raw_crc_kind(void) { return crc32c_kind(); }
