/* The hash table of posix_store/table.py over the rows of posix_store/index.py, which say what these do. */
#ifndef POSIX_STORE_TABLE_H
#define POSIX_STORE_TABLE_H

#include <stdint.h>
#include <string.h>

enum { EMPTY = -1, GROUP = 32 };

/* As `ROW` in posix_store/index.py: what a look-up reads of a block is in one or two lines of the cache. */
struct row {
    uint64_t id[2];
    uint64_t parent[2];
    int64_t offset;
    double stored, used;
    uint32_t length, crc;
    int32_t segment;
    uint16_t shard, last_shard;
};

struct table {
    int32_t *slots;
    struct row *rows;
    uint64_t mask; /* slots less one, which are a power of two */
    int64_t count; /* rows there is room for */
};

/* Where the rows that are found go, each array of as many items as there are keys. */
struct found {
    int64_t *row;
    int32_t *segment;
    int64_t *offset, *length;
    uint32_t *crc;
    uint16_t *last_shard;
};

static uint64_t home_of(const struct table *t, const uint64_t *id, uint16_t shard) {
    uint64_t mixed =
        id[0] * 0x9E3779B97F4A7C15u + id[1] * 0xC2B2AE3D27D4EB4Fu + (uint64_t)shard * 0x165667B19E3779F9u;
    mixed ^= mixed >> 29;
    mixed *= 0xC2B2AE3D27D4EB4Fu;
    return (mixed >> 32) & t->mask;
}

static int64_t table_probe(const struct table *t, uint64_t slot, const uint64_t *id, uint16_t shard) {
    for (uint64_t tries = 0; tries <= t->mask && t->slots[slot] != EMPTY; tries++, slot = (slot + 1) & t->mask) {
        int64_t row = t->slots[slot];
        if (row < 0 || row >= t->count) continue;
        const struct row *r = t->rows + row;
        if (r->id[0] == id[0] && r->id[1] == id[1] && r->shard == shard) return row;
    }
    return -1;
}

/* Rows of keys, -1 where absent. In groups, so that the memory answers many of them at once: a table of a million
 * blocks is in no cache. */
static void table_find(const struct table *t, const uint64_t *ids, const uint16_t *shards, int64_t count,
                       int64_t *rows) {
    uint64_t slots[GROUP];
    for (int64_t at = 0; at < count; at += GROUP) {
        int64_t n = count - at < GROUP ? count - at : GROUP;
        for (int64_t i = 0; i < n; i++) {
            slots[i] = home_of(t, ids + 2 * (at + i), shards[at + i]);
            __builtin_prefetch(t->slots + slots[i]);
        }
        for (int64_t i = 0; i < n; i++) {
            int64_t row = t->slots[slots[i]];
            if (row >= 0 && row < t->count) {
                __builtin_prefetch(t->rows + row);
                __builtin_prefetch((const char *)(t->rows + row + 1) - 1);
            }
        }
        for (int64_t i = 0; i < n; i++)
            rows[at + i] = table_probe(t, slots[i], ids + 2 * (at + i), shards[at + i]);
    }
}

/* `table_find`, and what the rows say. */
static void table_locate(const struct table *t, const uint64_t *ids, const uint16_t *shards, int64_t count,
                         struct found out) {
    static const struct row absent = {.segment = -1};
    table_find(t, ids, shards, count, out.row);
    for (int64_t i = 0; i < count; i++) {
        const struct row *r = out.row[i] < 0 ? &absent : t->rows + out.row[i];
        out.segment[i] = r->segment;
        out.offset[i] = r->offset;
        out.length[i] = r->length;
        out.crc[i] = r->crc;
        out.last_shard[i] = r->last_shard;
    }
}

static void table_insert(const struct table *t, const int64_t *rows, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= t->count) continue;
        uint64_t slot = home_of(t, t->rows[rows[i]].id, t->rows[rows[i]].shard);
        for (uint64_t tries = 0; tries <= t->mask && t->slots[slot] != EMPTY; tries++) slot = (slot + 1) & t->mask;
        t->slots[slot] = (int32_t)rows[i];
    }
}

/* Fills rows from the PUT records (docs/FORMAT.md) of blocks that are not there and not sharded. */
static void rows_from_records(struct table *t, const int64_t *rows, const uint8_t *records, int64_t count,
                              int32_t segment, double when) {
    for (int64_t i = 0; i < count; i++, records += 64) {
        if (rows[i] < 0 || rows[i] >= t->count) continue;
        struct row *r = t->rows + rows[i];
        memcpy(r->id, records, 16);
        memcpy(r->parent, records + 16, 16);
        memcpy(&r->offset, records + 32, 8);
        memcpy(&r->length, records + 40, 4);
        memcpy(&r->crc, records + 44, 4);
        r->shard = r->last_shard = 0;
        r->segment = segment;
        r->stored = r->used = when;
    }
}

#endif
