/* CRC-32C (Castagnoli, RFC 3720) for one translation unit: the fastest way this CPU has, chosen when loaded.
 *
 *   crc32c_update(crc, data, length)         continues `crc` (0 at the start), as zlib's crc32() does
 *   crc32c_combine(crc_a, crc_b, length_b)   the CRC of a followed by b, of which b has length_b bytes
 *   crc32c_kind()                            "avx512", "pclmul", "sse42", "arm64" or "portable"
 *   crc32c_select(kind)                      takes that way instead; 0: this CPU (or kind) cannot. For tests
 *
 * Needs gcc 8 or clang, and no compiler flags: every function names the instructions it uses. All functions
 * are safe to call from any thread and hold no lock; a select during an update changes only later updates.
 *
 * How bits are read. A CRC is a polynomial over GF(2) modulo P (0x1EDC6F41 and x^32), the first bit of the
 * message being the highest power. CRC-32C takes each byte's lowest bit first, so registers are mirrored:
 * bit 0 of an n-bit register stands for x^(n-1). Functions named *_raw take and return the register itself,
 * without the two inversions that make a CRC of it: raw(s, m) = (s * x^bits(m) + m * x^32) mod P.
 */
#ifndef POSIX_STORE_CRC32C_H
#define POSIX_STORE_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define CRC32C_UNUSED __attribute__((unused)) /* whoever includes this need not call everything */
#define CRC32C_INLINE static inline __attribute__((always_inline))

#define CRC32C_P 0x82f63b78u /* P without x^32, mirrored */

/* CRC32C_Xe is x^e mod P, mirrored: start with 1, e times multiply by x (shift left) and where x^32 appears
 * add P; then reverse the 32 bits. Two uses:
 *  - lanes of L bytes are joined by x^(8L) and x^(16L), for L = 1024 and 4096;
 *  - folding a register over N bits takes x^(N+31) and x^(N-33): see crc32c_fold. */
#define CRC32C_X8192 0xe4172b16u
#define CRC32C_X16384 0x0d65762au
#define CRC32C_X32768 0x35d73a62u
#define CRC32C_X65536 0x28461564u
#define CRC32C_X95 0x493c7d27u
#define CRC32C_X159 0xf20c0dfeu
#define CRC32C_X479 0x9e4addf8u
#define CRC32C_X543 0x740eef02u
#define CRC32C_X991 0x0d3b6092u
#define CRC32C_X1055 0x6992cea2u
#define CRC32C_X4063 0xdd7e3b0cu
#define CRC32C_X4127 0xbd6f81f8u

typedef uint32_t (*crc32c_raw_function)(uint32_t state, const uint8_t *data, size_t length);

/* ---- Arithmetic modulo P, and the portable way ---- */

static uint32_t crc32c_table[8][256]; /* [k][byte]: what `byte` adds to the register k bytes later */
static uint32_t crc32c_square[31];    /* [k]: x^(2^k) */

/* a * x */
CRC32C_INLINE uint32_t crc32c_times_x(uint32_t a) { return (a >> 1) ^ (CRC32C_P & (0u - (a & 1u))); }

/* a * b. No branch on the bits: they are random, so that a branch would be mispredicted every other time. */
static uint32_t crc32c_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (int power = 0; power < 32; power++) {
        product ^= a & (0u - (b >> 31));
        b <<= 1;
        a = crc32c_times_x(a);
    }
    return product;
}

static void crc32c_fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = crc32c_times_x(state);
        crc32c_table[0][byte] = state;
    }
    for (int later = 1; later < 8; later++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t state = crc32c_table[later - 1][byte];
            crc32c_table[later][byte] = (state >> 8) ^ crc32c_table[0][state & 0xff];
        }
    crc32c_square[0] = 0x40000000u; /* x */
    for (int k = 1; k < 31; k++)
        crc32c_square[k] = crc32c_multiply(crc32c_square[k - 1], crc32c_square[k - 1]);
}

/* Eight bytes a step, each looked up in a table of its own ("slicing by 8"): eight independent loads. */
static uint32_t crc32c_portable_raw(uint32_t state, const uint8_t *data, size_t length)
{
    for (; length >= 8; data += 8, length -= 8) {
        state = crc32c_table[7][data[0] ^ (state & 0xff)] ^ crc32c_table[6][data[1] ^ (state >> 8 & 0xff)] ^
                crc32c_table[5][data[2] ^ (state >> 16 & 0xff)] ^ crc32c_table[4][data[3] ^ (state >> 24)] ^
                crc32c_table[3][data[4]] ^ crc32c_table[2][data[5]] ^ crc32c_table[1][data[6]] ^
                crc32c_table[0][data[7]];
    }
    for (; length > 0; data++, length--)
        state = (state >> 8) ^ crc32c_table[0][(state ^ *data) & 0xff];
    return state;
}

/* ---- The CPU's own CRC-32C instruction, in three lanes ---- */

/* Assembler, because compilers differ in the header and the options that give the intrinsics. */
#if defined(__x86_64__)
#define CRC32C_INSTRUCTION
CRC32C_INLINE uint32_t crc32c_step8(uint32_t state, uint64_t word)
{
    __asm__("crc32q %1, %q0" : "+r"(state) : "r"(word));
    return state;
}
CRC32C_INLINE uint32_t crc32c_step1(uint32_t state, uint8_t byte)
{
    __asm__("crc32b %1, %0" : "+r"(state) : "r"(byte));
    return state;
}
#elif defined(__aarch64__) && defined(__AARCH64EL__)
#define CRC32C_INSTRUCTION
CRC32C_INLINE uint32_t crc32c_step8(uint32_t state, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
    return state;
}
CRC32C_INLINE uint32_t crc32c_step1(uint32_t state, uint8_t byte)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"((uint32_t)byte));
    return state;
}
#endif

#if defined(CRC32C_INSTRUCTION)

CRC32C_INLINE uint64_t crc32c_load8(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word); /* any alignment */
    return word;
}

/* One after the other, for ends: each step waits for the one before it. */
static uint32_t crc32c_serial_raw(uint32_t state, const uint8_t *data, size_t length)
{
    for (; length >= 8; data += 8, length -= 8)
        state = crc32c_step8(state, crc32c_load8(data));
    for (; length > 0; data++, length--)
        state = crc32c_step1(state, *data);
    return state;
}

/* The instruction takes about three cycles but one can start each cycle: three lanes keep it busy. */
static inline uint32_t crc32c_three_raw(uint32_t state, const uint8_t *data, size_t lane, uint32_t over_one,
                                        uint32_t over_two)
{
    uint32_t second = 0, third = 0;
    for (const uint8_t *end = data + lane; data < end; data += 8) {
        state = crc32c_step8(state, crc32c_load8(data));
        second = crc32c_step8(second, crc32c_load8(data + lane));
        third = crc32c_step8(third, crc32c_load8(data + 2 * lane));
    }
    return crc32c_multiply(state, over_two) ^ crc32c_multiply(second, over_one) ^ third;
}

static uint32_t crc32c_instruction_raw(uint32_t state, const uint8_t *data, size_t length)
{
    /* Two sizes: long lanes make the joins cheap, short ones leave little for the serial end. */
    for (; length >= 3 * 4096; data += 3 * 4096, length -= 3 * 4096)
        state = crc32c_three_raw(state, data, 4096, CRC32C_X32768, CRC32C_X65536);
    for (; length >= 3 * 1024; data += 3 * 1024, length -= 3 * 1024)
        state = crc32c_three_raw(state, data, 1024, CRC32C_X8192, CRC32C_X16384);
    return crc32c_serial_raw(state, data, length);
}

#endif

/* ---- Folding by carry-less multiplication ---- */

#if defined(__x86_64__)

#define CRC32C_PCLMUL __attribute__((target("sse4.2,pclmul")))
#define CRC32C_AVX512 __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

/* Folding moves 128 bits N bits ahead in the message, where they are added to the data there: their first
 * half H and second half L are H * x^(N+64) + L * x^N modulo P. A mirrored product of two 64-bit registers in
 * 128 bits, which it always fits, has one x too many; and a 32-bit constant in the low half of 64 bits stands
 * for x^32 times itself. So the constants are x^(N+64-33) and x^(N-33). */
#define CRC32C_KEY(plus31, minus33) _mm_set_epi64x((long long)(minus33), (long long)(plus31))

CRC32C_INLINE CRC32C_PCLMUL __m128i crc32c_load16(const uint8_t *data)
{
    return _mm_loadu_si128((const __m128i *)(const void *)data);
}

/* The CPU's own prefetching stops at 4 KiB pages and lags behind folding: asking for the line a page ahead
 * makes reading from memory half as fast again or better. Past the end of the data it does no harm, as a
 * prefetch never faults; only a C pointer must not go there, hence the integer. */
CRC32C_INLINE void crc32c_prefetch(const uint8_t *data)
{
    _mm_prefetch((const char *)((uintptr_t)data + 4096), _MM_HINT_T0);
}

CRC32C_INLINE CRC32C_PCLMUL __m128i crc32c_fold(__m128i sum, __m128i key, __m128i data)
{
    __m128i first = _mm_clmulepi64_si128(sum, key, 0x00), second = _mm_clmulepi64_si128(sum, key, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, data), second);
}

/* When less than a big step remains: whole 16 bytes are folded into `sum`; then `sum`, as if it were 16 bytes
 * of the message, and the last 0 to 15 bytes go through the CRC instruction, which does the modulo. */
CRC32C_INLINE CRC32C_PCLMUL uint32_t crc32c_finish_raw(__m128i sum, const uint8_t *data, size_t length)
{
    const __m128i key = CRC32C_KEY(CRC32C_X159, CRC32C_X95);
    for (; length >= 16; data += 16, length -= 16)
        sum = crc32c_fold(sum, key, crc32c_load16(data));
    uint32_t state = crc32c_step8(0, (uint64_t)_mm_cvtsi128_si64(sum));
    state = crc32c_step8(state, (uint64_t)_mm_extract_epi64(sum, 1));
    return crc32c_serial_raw(state, data, length);
}

/* Eight sums, as a multiplication takes about seven cycles and one can start each cycle. */
CRC32C_PCLMUL static uint32_t crc32c_pclmul_raw(uint32_t state, const uint8_t *data, size_t length)
{
    if (length < 128)
        return crc32c_serial_raw(state, data, length);
    const __m128i far = CRC32C_KEY(CRC32C_X1055, CRC32C_X991), near = CRC32C_KEY(CRC32C_X159, CRC32C_X95);
    __m128i s0 = _mm_xor_si128(crc32c_load16(data), _mm_cvtsi32_si128((int)state));
    __m128i s1 = crc32c_load16(data + 16), s2 = crc32c_load16(data + 32), s3 = crc32c_load16(data + 48);
    __m128i s4 = crc32c_load16(data + 64), s5 = crc32c_load16(data + 80), s6 = crc32c_load16(data + 96);
    __m128i s7 = crc32c_load16(data + 112);
    for (data += 128, length -= 128; length >= 128; data += 128, length -= 128) {
        crc32c_prefetch(data);
        crc32c_prefetch(data + 64);
        s0 = crc32c_fold(s0, far, crc32c_load16(data));
        s1 = crc32c_fold(s1, far, crc32c_load16(data + 16));
        s2 = crc32c_fold(s2, far, crc32c_load16(data + 32));
        s3 = crc32c_fold(s3, far, crc32c_load16(data + 48));
        s4 = crc32c_fold(s4, far, crc32c_load16(data + 64));
        s5 = crc32c_fold(s5, far, crc32c_load16(data + 80));
        s6 = crc32c_fold(s6, far, crc32c_load16(data + 96));
        s7 = crc32c_fold(s7, far, crc32c_load16(data + 112));
    }
    s3 = crc32c_fold(crc32c_fold(crc32c_fold(s0, near, s1), near, s2), near, s3);
    s7 = crc32c_fold(crc32c_fold(crc32c_fold(crc32c_fold(s3, near, s4), near, s5), near, s6), near, s7);
    return crc32c_finish_raw(s7, data, length);
}

CRC32C_INLINE CRC32C_AVX512 __m512i crc32c_load64(const uint8_t *data) { return _mm512_loadu_si512(data); }

/* crc32c_fold for four registers at once; 0x96 is the sum of all three. */
CRC32C_INLINE CRC32C_AVX512 __m512i crc32c_fold4(__m512i sum, __m512i key, __m512i data)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, key, 0x00),
                                     _mm512_clmulepi64_epi128(sum, key, 0x11), data, 0x96);
}

CRC32C_INLINE CRC32C_AVX512 __m512i crc32c_far4(__m512i sum, __m512i key, const uint8_t *data)
{
    crc32c_prefetch(data);
    return crc32c_fold4(sum, key, crc32c_load64(data));
}

/* As crc32c_pclmul_raw, with registers of 64 bytes. */
CRC32C_AVX512 static uint32_t crc32c_avx512_raw(uint32_t state, const uint8_t *data, size_t length)
{
    if (length < 512)
        return crc32c_pclmul_raw(state, data, length);
    const __m512i far = _mm512_broadcast_i32x4(CRC32C_KEY(CRC32C_X4127, CRC32C_X4063));
    const __m512i near = _mm512_broadcast_i32x4(CRC32C_KEY(CRC32C_X543, CRC32C_X479));
    const __m128i lane = CRC32C_KEY(CRC32C_X159, CRC32C_X95);
    const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state));
    __m512i s0 = _mm512_xor_si512(crc32c_load64(data), start);
    __m512i s1 = crc32c_load64(data + 64), s2 = crc32c_load64(data + 128), s3 = crc32c_load64(data + 192);
    __m512i s4 = crc32c_load64(data + 256), s5 = crc32c_load64(data + 320), s6 = crc32c_load64(data + 384);
    __m512i s7 = crc32c_load64(data + 448);
    for (data += 512, length -= 512; length >= 512; data += 512, length -= 512) {
        s0 = crc32c_far4(s0, far, data);
        s1 = crc32c_far4(s1, far, data + 64);
        s2 = crc32c_far4(s2, far, data + 128);
        s3 = crc32c_far4(s3, far, data + 192);
        s4 = crc32c_far4(s4, far, data + 256);
        s5 = crc32c_far4(s5, far, data + 320);
        s6 = crc32c_far4(s6, far, data + 384);
        s7 = crc32c_far4(s7, far, data + 448);
    }
    s3 = crc32c_fold4(crc32c_fold4(crc32c_fold4(s0, near, s1), near, s2), near, s3);
    s7 = crc32c_fold4(crc32c_fold4(crc32c_fold4(crc32c_fold4(s3, near, s4), near, s5), near, s6), near, s7);
    for (; length >= 64; data += 64, length -= 64)
        s7 = crc32c_fold4(s7, near, crc32c_load64(data));
    __m128i sum = crc32c_fold(_mm512_castsi512_si128(s7), lane, _mm512_extracti32x4_epi32(s7, 1));
    sum = crc32c_fold(sum, lane, _mm512_extracti32x4_epi32(s7, 2));
    sum = crc32c_fold(sum, lane, _mm512_extracti32x4_epi32(s7, 3));
    return crc32c_finish_raw(sum, data, length);
}

#endif

/* ---- Choosing ---- */

struct crc32c_way {
    const char *kind;
    crc32c_raw_function raw;
    int (*possible)(void);
};

static int crc32c_always(void) { return 1; }

#if defined(__x86_64__)
/* Asked of the CPU itself: the library behind __builtin_cpu_supports is a stub in some tool chains. */
static int crc32c_has(unsigned ecx_bits)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & ecx_bits) == ecx_bits;
}
static int crc32c_has_sse42(void) { return crc32c_has(bit_SSE4_2); }
static int crc32c_has_pclmul(void) { return crc32c_has(bit_SSE4_2 | bit_PCLMUL); }
static int crc32c_has_avx512(void)
{
    unsigned eax, ebx, ecx, edx, saved, high;
    if (!crc32c_has(bit_SSE4_2 | bit_PCLMUL | bit_OSXSAVE))
        return 0;
    /* The kernel must save xmm, ymm, the mask registers and both parts of zmm: bits 1, 2, 5, 6 and 7. */
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    return (saved & 0xe6) == 0xe6 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX512F) &&
           (ecx & bit_VPCLMULQDQ);
}
#elif defined(CRC32C_INSTRUCTION) && defined(__linux__)
static int crc32c_has_arm64(void) { return (getauxval(AT_HWCAP) & (1u << 7)) != 0; /* HWCAP_CRC32 */ }
#elif defined(CRC32C_INSTRUCTION)
static int crc32c_has_arm64(void) { return 1; /* every other aarch64 system of today requires it */ }
#endif

/* Best first; the last is always possible. */
static const struct crc32c_way crc32c_ways[] = {
#if defined(__x86_64__)
    {"avx512", crc32c_avx512_raw, crc32c_has_avx512},
    {"pclmul", crc32c_pclmul_raw, crc32c_has_pclmul},
    {"sse42", crc32c_instruction_raw, crc32c_has_sse42},
#elif defined(CRC32C_INSTRUCTION)
    {"arm64", crc32c_instruction_raw, crc32c_has_arm64},
#endif
    {"portable", crc32c_portable_raw, crc32c_always},
};
static const struct crc32c_way *crc32c_chosen;

/* When loaded, hence before any thread can call: nothing here needs a lock or a check at each call. */
__attribute__((constructor)) static void crc32c_setup(void)
{
    crc32c_fill_tables();
    const struct crc32c_way *way = crc32c_ways;
    while (!way->possible())
        way++;
    __atomic_store_n(&crc32c_chosen, way, __ATOMIC_RELAXED);
}

/* Atomic only because of crc32c_select: what the pointer points to never changes. */
CRC32C_INLINE const struct crc32c_way *crc32c_current(void)
{
    return __atomic_load_n(&crc32c_chosen, __ATOMIC_RELAXED);
}

CRC32C_UNUSED static const char *crc32c_kind(void) { return crc32c_current()->kind; }

CRC32C_UNUSED static int crc32c_select(const char *kind)
{
    for (size_t i = 0; i < sizeof crc32c_ways / sizeof crc32c_ways[0]; i++)
        if (strcmp(crc32c_ways[i].kind, kind) == 0 && crc32c_ways[i].possible()) {
            __atomic_store_n(&crc32c_chosen, &crc32c_ways[i], __ATOMIC_RELAXED);
            return 1;
        }
    return 0;
}

CRC32C_UNUSED static uint32_t crc32c_update(uint32_t crc, const void *data, size_t length)
{
    return ~crc32c_current()->raw(~crc, (const uint8_t *)data, length);
}

/* crc_a * x^(8 * length_b) + crc_b; the inversions cancel out. At most 31 multiplications: a microsecond. */
CRC32C_UNUSED static uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b)
{
    /* P = (x + 1) * (a primitive polynomial of degree 31): powers of x repeat after 2^31 - 1. */
    const uint64_t period = 0x7fffffffu;
    uint64_t exponent = length_b % period * 8 % period;
    for (int k = 0; exponent >> k != 0; k++)
        if (exponent >> k & 1)
            crc_a = crc32c_multiply(crc_a, crc32c_square[k]);
    return crc_a ^ crc_b;
}

#endif
