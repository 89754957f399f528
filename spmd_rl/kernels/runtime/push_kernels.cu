// Kernels of a push: digests of boxes, and copies of many tensors, each in one launch.
//
// NVRTC compiles this file (cuda_kernels.py), with THREADS, DIGEST_CHUNK and COPY_CHUNK from there.
// A chunk is what one block works on at a time. Memory is read and written in words of 16 bytes
// where it is aligned to them. Without __CUDACC__ a C++ compiler takes it too, for tests on CPUs.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;

constexpr int WORD_BYTES = 16;

// Round to bfloat16, ties to even, as torch and Triton do on GPUs.
__device__ inline short as_bf16(float x) {
#ifdef __CUDACC__
    short rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
#else
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fff;
    return (short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

// An element as a push sends it: its own bits, or those of the bfloat16 that it becomes.
template <bool CASTS, typename T>
__device__ inline auto sent(T x) {
    if constexpr (CASTS) {
        return as_bf16(x);
    } else {
        return x;
    }
}

// The term of an element in the sum of a digest (splitmix.py, weights/digest.py).
__device__ inline u64 mix(i64 bits, u64 index) {
    u64 x = index * 0x9E3779B97F4A7C15ull + (u64)bits * 0xD1342543DE82EF95ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Add what the threads of a block found; integers may be added in any order.
__device__ inline void add_of_block(u64* sum, u64 found) {
#ifdef __CUDACC__
    for (int away = 16; away; away /= 2) found += __shfl_down_sync(~0u, found, away);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, found);
#else
    *sum += found;
#endif
}

// Add the digest of each row of `table` (row_digests.Rows) to the sum of its box. A block takes
// the row and the chunk of it that `chunks` names.
template <typename T, bool CASTS>
__global__ void digest(u64* sums, const i64* table, const i64* chunks) {
    constexpr int WIDE = WORD_BYTES / sizeof(T);
    const i64* row = table + chunks[2 * blockIdx.x] * 7;
    const i64 begin = chunks[2 * blockIdx.x + 1] * DIGEST_CHUNK;
    const T* memory = (const T*)row[0];
    const i64 num_rows = row[1], row_size = row[2], stride = row[3];
    const i64 first = row[4], index_stride = row[5], size = num_rows * row_size;
    const i64 end = begin + DIGEST_CHUNK < size ? begin + DIGEST_CHUNK : size;
    const bool is_run = num_rows == 1;
    const bool fits = row_size % WIDE == 0 && stride % WIDE == 0;
    const bool is_wide = row[0] % WORD_BYTES == 0 && (is_run || fits);
    u64 found = 0;
    const i64 step = is_wide ? WIDE : 1;
    for (i64 at = begin + threadIdx.x * step; at < end; at += THREADS * step) {
        // several rows have less than 2^31 elements together
        const i64 r = is_run ? 0 : (unsigned)at / (unsigned)row_size;
        const i64 c = at - r * row_size;
        const T* place = memory + r * stride + c;
        const u64 index = first + r * index_stride + c;
        if (is_wide && at + WIDE <= end) {
            const uint4 word = *(const uint4*)place;
            const T* values = (const T*)&word;
#pragma unroll
            for (int i = 0; i < WIDE; i++) found += mix(sent<CASTS>(values[i]), index + i);
        } else {
            for (int i = 0; i < step && at + i < end; i++) {
                found += mix(sent<CASTS>(place[i]), index + i);
            }
        }
    }
    add_of_block(sums + row[6], found);
}

// Copy runs: `table` has where each goes to, where it comes from, both from a base in bytes, and
// its size. A block takes chunk after chunk, as far apart as there are blocks.
template <typename TARGET, typename SOURCE, bool CASTS>
__global__ void copy(const i64* table, const i64* chunks, i64 num_chunks, i64 target_base,
                     i64 source_base) {
    constexpr int WIDE = WORD_BYTES / sizeof(TARGET);
    constexpr int NUM_READ = sizeof(SOURCE) / sizeof(TARGET);
    for (i64 chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const i64* run = table + chunks[2 * chunk] * 3;
        const i64 begin = chunks[2 * chunk + 1] * COPY_CHUNK, size = run[2];
        const i64 end = begin + COPY_CHUNK < size ? begin + COPY_CHUNK : size;
        TARGET* target = (TARGET*)(run[0] + target_base);
        const SOURCE* source = (const SOURCE*)(run[1] + source_base);
        for (i64 at = begin + threadIdx.x * WIDE; at < end; at += THREADS * WIDE) {
            if (at + WIDE <= end) {
                uint4 read[NUM_READ], word;
#pragma unroll
                for (int i = 0; i < NUM_READ; i++) read[i] = ((const uint4*)(source + at))[i];
                const SOURCE* values = (const SOURCE*)read;
                TARGET* written = (TARGET*)&word;
#pragma unroll
                for (int i = 0; i < WIDE; i++) written[i] = sent<CASTS>(values[i]);
                *(uint4*)(target + at) = word;
            } else {
                for (i64 i = at; i < end; i++) target[i] = sent<CASTS>(source[i]);
            }
        }
    }
}
