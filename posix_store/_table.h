/* The hash table of posix_store/table.py, which says what these do. Keys are in columns: 16-byte ids and shards. */
#ifndef POSIX_STORE_TABLE_H
#define POSIX_STORE_TABLE_H

#include <stdint.h>

enum { EMPTY = -1 };

struct columns {
    int32_t *slots;
    const uint64_t *ids; /* (rows, 2) */
    const uint16_t *shards;
    uint64_t mask; /* slots less one, which are a power of two */
    int64_t rows;
};

static uint64_t home_of(const struct columns *t, const uint64_t *id, uint16_t shard) {
    uint64_t mixed =
        id[0] * 0x9E3779B97F4A7C15u + id[1] * 0xC2B2AE3D27D4EB4Fu + (uint64_t)shard * 0x165667B19E3779F9u;
    mixed ^= mixed >> 29;
    mixed *= 0xC2B2AE3D27D4EB4Fu;
    return (mixed >> 32) & t->mask;
}

static void table_find(const struct columns *t, const uint64_t *ids, const uint16_t *shards, int64_t count,
                       int64_t *found) {
    enum { AHEAD = 8 };
    for (int64_t i = 0; i < count && i < AHEAD; i++)
        __builtin_prefetch(t->slots + home_of(t, ids + 2 * i, shards[i]));
    for (int64_t i = 0; i < count; i++) {
        const uint64_t *id = ids + 2 * i;
        uint64_t slot = home_of(t, id, shards[i]);
        if (i + AHEAD < count)
            __builtin_prefetch(t->slots + home_of(t, id + 2 * AHEAD, shards[i + AHEAD]));
        found[i] = -1;
        for (uint64_t tries = 0; tries <= t->mask && t->slots[slot] != EMPTY; tries++, slot = (slot + 1) & t->mask) {
            int64_t row = t->slots[slot];
            if (row < 0 || row >= t->rows || t->shards[row] != shards[i]) continue;
            if (t->ids[2 * row] != id[0] || t->ids[2 * row + 1] != id[1]) continue;
            found[i] = row;
            break;
        }
    }
}

static void table_insert(const struct columns *t, const int64_t *rows, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= t->rows) continue;
        uint64_t slot = home_of(t, t->ids + 2 * rows[i], t->shards[rows[i]]);
        for (uint64_t tries = 0; tries <= t->mask && t->slots[slot] != EMPTY; tries++) slot = (slot + 1) & t->mask;
        t->slots[slot] = (int32_t)rows[i];
    }
}

#endif
