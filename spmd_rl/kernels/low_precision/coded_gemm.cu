// Products of few rows of x with a weight in few bits, on NVIDIA Hopper.
//
// NVRTC compiles this file (coded_gemm.py) for one tile at a time. Codes come into shared memory as
// they are. Threads take them into registers, decode them there, and multiply in one ascending chain
// over K. Up to 16 rows of x, warps do so on their own with mma.sync (Warps). With more rows, four
// warps at a time use wgmma (Groups). Both have the same bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int LANES = 32;
constexpr int UNIT = 16;    // bytes of a copy
constexpr int CHUNK = 64;   // bytes of a row that one ldmatrix takes, as four units
constexpr int GROUP = 16;   // columns that an instruction multiplies
constexpr int EIGHT = 8;    // rows of a matrix of ldmatrix, and of a swizzle
constexpr int BLOCK = 128;  // columns that share a scale, and rows where codes have 8 bits

__device__ inline u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// Programmatic dependent launch (pdl.py).
__device__ inline void let_next_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ inline void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Copy a unit, or zeros where its size is 0.
__device__ inline void copy_unit(u32 to, const void* from, int size) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(size) : "memory");
}

__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ inline void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Take four units of eight rows each: thread 4 r + t gets bytes 4 t to 4 t + 3 of row r.
__device__ inline void take_units(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}

__device__ inline u32 take_pair(u32 from) {
    u16 found;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(from));
    return found;
}

__device__ inline u32 permuted(u32 bytes, u32 selector) {
    u32 found;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(found) : "r"(bytes), "r"(selector));
    return found;
}

__device__ inline u32 times(u32 pair, u32 factors) {
    u32 found;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(factors));
    return found;
}

__device__ inline u32 minus(u32 pair, u32 other) {
    u32 found;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(other));
    return found;
}

__device__ inline u16 as_bf16(float number) {
    u16 found;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(number));
    return found;
}

__device__ inline float as_float(u16 number) { return __uint_as_float((u32)number << 16); }

// Decode two neighbouring codes of a row, or those in the higher bits of their bytes. `factors` has
// the scale twice; for e4m3 times 2^120, as the bits of a code in bfloat16's places are 2^-120 times
// the code.
template <int BITS>
__device__ inline u32 decoded(u32 bytes, int part, u32 factors) {
    if constexpr (BITS == 8) {
        // a byte with copies of its sign above, moved to where bfloat16 has exponent and mantissa
        return times(permuted(bytes, 0x9180) << 4 & 0x87f087f0, factors);
    } else {
        // a code, with 0x4308 as exclusive or, is a bfloat16 number: 136 more than the code
        constexpr u32 BIAS = 0x43084308;
        u32 pair = permuted(part ? bytes >> 4 : bytes, 0x4140);
        return times(minus((pair & 0x000f000f) ^ BIAS, BIAS), factors);
    }
}

// Add 16 rows of x times 8 rows of the weight.
__device__ inline void multiply(float (&sums)[4], const u32 (&x)[4], u32 low, u32 high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(low), "r"(high));
}

// Begin to add 64 rows of the weight times COLS rows of x with wgmma. coded_gemm.py writes it.
template <int COLS>
__device__ void multiply_group(float* sums, const u32 (&rows)[4], u64 x);

// A scale twice, as `decoded` takes it, of the block at `row` and a block of columns.
template <int BITS>
__device__ inline u32 factors_of(const void* scales, int row, int blocks, int block) {
    block = min(block, blocks - 1);
    u32 factor;
    if constexpr (BITS == 8) {
        float scale = __ldg((const float*)scales + (i64)(row / BLOCK) * blocks + block);
        factor = as_bf16(scale * 1.329227995784916e36f);  // 2^120
    } else {
        factor = __ldg((const u16*)scales + (i64)row * blocks + block);
    }
    return factor << 16 | factor;
}

// Copies of tiles of ROWS rows, each of so many units in a step, by the threads of a block. A thread
// always takes the same units of a row.
template <int ROWS, int UNITS, int PITCH, int THREADS, bool ZEROS, bool SWIZZLED = false>
struct Copies {
    static_assert(THREADS % UNITS == 0);
    static constexpr int APART = THREADS / UNITS;  // rows between two of a thread
    const u8* from;
    u32 to;
    int stride, row, rows, first_byte, bytes;

    // `rows` rows of `bytes` bytes are there from `from` on; what lies beyond is zero, or with rows
    // of the weight, whose products nobody stores, the last row.
    __device__ Copies(const void* from, int stride, int rows, int bytes)
        : from((const u8*)from + threadIdx.x % UNITS * UNIT),
          to(place(threadIdx.x / UNITS, threadIdx.x % UNITS)), stride(stride),
          row(threadIdx.x / UNITS), rows(rows), first_byte(threadIdx.x % UNITS * UNIT),
          bytes(bytes) {}

    // Where a unit of a row lies. Swizzled, eight units of all rows come before the next eight, and
    // their order among each other follows from the row, as wgmma wants it.
    static __device__ int place(int row, int unit) {
        if constexpr (SWIZZLED)
            return unit / 8 * ROWS * PITCH + row * PITCH + ((unit ^ row) & 7) * UNIT;
        else
            return row * PITCH + unit * UNIT;
    }

    __device__ void operator()(u32 stage, int step) const {
        int begin = step * UNITS * UNIT;
        bool wanted = begin + first_byte < bytes;
        const u8* start = from + (wanted ? begin : 0);
#pragma unroll
        for (int next = 0; next < (ROWS + APART - 1) / APART; next++) {
            int at = row + next * APART;
            if (ROWS % APART == 0 || at < ROWS) {
                bool there = wanted && (!ZEROS || at < rows);
                int place_of = !SWIZZLED || APART % 8 == 0 ? to + next * APART * PITCH
                                                           : place(at, threadIdx.x % UNITS);
                copy_unit(stage + place_of, start + (i64)min(at, rows - 1) * stride,
                          there ? UNIT : 0);
            }
        }
    }
};

template <bool FIRST, typename A, typename B>
struct Choice {
    using Type = A;
};
template <typename A, typename B>
struct Choice<false, A, B> {
    using Type = B;
};

// What a block has in shared memory: in each of STAGES stages a step's codes of ROWS rows of the
// weight and COLS rows of x.
template <int BITS, int ROWS, int COLS, int WARPS, int STEP, int STAGES, bool SWIZZLED>
struct Ring {
    static constexpr int THREADS = LANES * WARPS, PER_BYTE = 8 / BITS;
    static constexpr int CODES = STEP / PER_BYTE;  // bytes of a row in a step
    // rows are so padded that what a warp takes at once lies in different banks
    static constexpr int CODE_PITCH = CODES + 16, X_PITCH = SWIZZLED ? 128 : 2 * STEP + 16;
    using CodeCopies = Copies<ROWS, CODES / UNIT, CODE_PITCH, THREADS, false>;
    using XCopies = Copies<COLS, 2 * STEP / UNIT, X_PITCH, THREADS, true, SWIZZLED>;
    static constexpr int CODE_PLACE = COLS * (SWIZZLED ? 2 * STEP : X_PITCH);
    static constexpr int BYTES = CODE_PLACE + ROWS * CODE_PITCH;
    // a swizzled tile begins at a multiple of 1024
    static constexpr int STAGE = SWIZZLED ? (BYTES + 1023) / 1024 * 1024 : BYTES;
    static constexpr int BLOCKS = STEP / BLOCK;
    static constexpr int CHUNKS = CODES / CHUNK;  // each of four groups of columns in each part
    static_assert(STEP % BLOCK == 0 && CODES % CHUNK == 0);
};

// Each warp multiplies 8 rows of the weight at a time by up to 16 rows of x.
template <int BITS, int ROWS, int COLS, int WARPS, int STEP, int STAGES>
struct Warps : Ring<BITS, ROWS, COLS, WARPS, STEP, STAGES, false> {
    using Own = Ring<BITS, ROWS, COLS, WARPS, STEP, STAGES, false>;
    static constexpr int TILES = ROWS / (EIGHT * WARPS);
    static constexpr int AHEAD = STAGES - 1;  // stages that are on their way
    static_assert(ROWS % (EIGHT * WARPS) == 0 && (COLS == 8 || COLS == 16));
    u32 factors[2][TILES][Own::BLOCKS];
    float sums[TILES][4] = {};
    int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * TILES * EIGHT;

    // Take the factors of a step on their way, for the step after the one at work.
    __device__ void take_factors(
        int next, const void* scales, int first_row, int n, int blocks, int step
    ) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int block = 0; block < Own::BLOCKS; block++) {
                int row = first_row + first + tile * EIGHT + lane / 4;
                factors[next][tile][block] = factors_of<BITS>(
                    scales, min(row, n - 1), blocks, step * Own::BLOCKS + block);
            }
    }

    __device__ void next_factors() {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int block = 0; block < Own::BLOCKS; block++)
                factors[0][tile][block] = factors[1][tile][block];
    }

    // Add the products of a step. What is multiplied next is on its way into registers meanwhile.
    __device__ void add_products(u32 stage) {
        constexpr int GROUPS = Own::CHUNKS * 4 * Own::PER_BYTE;
        u32 codes = stage + Own::CODE_PLACE + (first + lane / 4) * Own::CODE_PITCH + lane % 4 * 2;
        // eight rows of x are taken twice where there are no more
        u32 x = stage + lane % COLS * Own::X_PITCH + lane / 16 * UNIT;
        u32 packed[2][TILES][4][2], of_x[2][4];
        take_codes(packed[0], codes);
        take_units(of_x[0], x);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            int chunk = group / (4 * Own::PER_BYTE), within = group % (4 * Own::PER_BYTE);
            if (within == 0 && chunk + 1 < Own::CHUNKS)
                take_codes(packed[(chunk + 1) % 2], codes + (chunk + 1) * CHUNK);
            if (group + 1 < GROUPS)
                take_units(of_x[(group + 1) % 2], x + (group + 1) * 2 * GROUP);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                u32 factor = factors[0][tile][group * GROUP / BLOCK];
                multiply(sums[tile], of_x[group % 2],
                         decoded<BITS>(packed[chunk % 2][tile][within % 4][0], within / 4, factor),
                         decoded<BITS>(packed[chunk % 2][tile][within % 4][1], within / 4, factor));
            }
        }
    }

    __device__ void begin() {}
    __device__ void finish() {}

    // Visit each sum with the number of its row of the weight, and of x, in the block.
    template <typename Visit>
    __device__ void visit(Visit visit) const {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int at = 0; at < 2 * (COLS / 8); at++)
                visit(first + tile * EIGHT + lane % 4 * 2 + at % 2, lane / 4 + at / 2 * 8,
                      sums[tile][at]);
    }

    static __device__ void take_codes(u32 (&to)[TILES][4][2], u32 from) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int pair = 0; pair < 8; pair++)
                to[tile][pair / 2][pair % 2] =
                    take_pair(from + tile * EIGHT * Own::CODE_PITCH + pair * EIGHT);
    }
};

// Four warps multiply 64 rows of the weight by COLS rows of x, which wgmma takes as they lie there.
template <int BITS, int ROWS, int COLS, int WARPS, int STEP, int STAGES>
struct Groups : Ring<BITS, ROWS, COLS, WARPS, STEP, STAGES, true> {
    using Own = Ring<BITS, ROWS, COLS, WARPS, STEP, STAGES, true>;
    // a stage is read until the products of the step after it have begun
    static constexpr int AHEAD = STAGES - 2;
    static constexpr int FOURS = STEP / 64;  // four groups of columns each
    static_assert(ROWS == 16 * WARPS && WARPS % 4 == 0 && STAGES > 2 && FOURS % 2 == 0);
    u32 factors[2][2][Own::BLOCKS];
    u32 rows[2][4][4];
    float sums[COLS / 2] = {};
    int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * 16;

    __device__ void take_factors(
        int next, const void* scales, int first_row, int n, int blocks, int step
    ) {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int block = 0; block < Own::BLOCKS; block++) {
                int row = first_row + first + half * 8 + lane / 4;
                if (BITS == 8 && half)
                    factors[next][1][block] = factors[next][0][block];
                else
                    factors[next][half][block] = factors_of<BITS>(
                        scales, min(row, n - 1), blocks, step * Own::BLOCKS + block);
            }
    }

    __device__ void next_factors() {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int block = 0; block < Own::BLOCKS; block++)
                factors[0][half][block] = factors[1][half][block];
    }

    // Begin to add the products of a step. Four groups of columns are decoded while the four before
    // them are multiplied, and those after them are on their way into registers.
    __device__ void add_products(u32 stage) {
        u32 codes = stage + Own::CODE_PLACE + (first + lane / 4) * Own::CODE_PITCH + lane % 4 * 2;
        u32 x = stage >> 4;
        u32 packed[2][4][4];
        take_codes(packed[0], codes);
#pragma unroll
        for (int four = 0; four < FOURS; four++) {
            int part = four % Own::PER_BYTE, chunk = four / Own::PER_BYTE;
            if (part == 0 && chunk + 1 < Own::CHUNKS)
                take_codes(packed[(chunk + 1) % 2], codes + (chunk + 1) * CHUNK);
            wait_for_products<1>();
            hold(rows[four % 2]);
#pragma unroll
            for (int group = 0; group < 4; group++)
#pragma unroll
                for (int pair = 0; pair < 4; pair++)
                    rows[four % 2][group][pair] =
                        decoded<BITS>(packed[chunk % 2][group][pair], part,
                                      factors[0][pair % 2][four * 64 / BLOCK]);
            hold(rows[four % 2]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int group = 0; group < 4; group++)
                multiply_group<COLS>(sums, rows[four % 2][group],
                                     of_x_at(x + (four * COLS * 128 + group * 2 * GROUP) / 16));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
    }

    // Say that the sums are set before the first products begin, and read after the last have ended.
    __device__ void begin() {
        hold_sums();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }

    __device__ void finish() {
        wait_for_products<0>();
        hold_sums();
    }

    __device__ void hold_sums() {
#pragma unroll
        for (int at = 0; at < COLS / 2; at++) asm volatile("" : "+f"(sums[at]) :: "memory");
    }

    template <typename Visit>
    __device__ void visit(Visit visit) const {
#pragma unroll
        for (int at = 0; at < COLS / 2; at++)
            visit(first + lane / 4 + at % 4 / 2 * 8, at / 4 * 8 + lane % 4 * 2 + at % 2, sums[at]);
    }

    static __device__ void take_codes(u32 (&to)[4][4], u32 from) {
#pragma unroll
        for (int group = 0; group < 4; group++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++)
                to[group][pair] = take_pair(
                    from + pair % 2 * 8 * Own::CODE_PITCH + group * UNIT + pair / 2 * 8);
    }

    // Keep the compiler from moving what wgmma reads meanwhile.
    static __device__ void hold(u32 (&four)[4][4]) {
#pragma unroll
        for (int at = 0; at < 16; at++) asm volatile("" : "+r"(four[at / 4][at % 4]) :: "memory");
    }

    template <int PENDING>
    static __device__ void wait_for_products() {
        asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
    }

    // The descriptor of x from an address on, in units: rows of 128 bytes, swizzled, of which eight
    // take 1024.
    static __device__ u64 of_x_at(u32 unit) { return (u64)(1u << 30 | 64u) << 32 | 1u << 16 | unit; }
};

// Write x times the decoded weight, and a bias, rounded once. Rows of x begin at multiples of 16
// bytes, and K is a multiple of 16. With `early`, no kernel ahead may write codes or scales.
template <
    int BITS, int ROWS, int COLS, int WARPS, int STEP, int STAGES, int PER_PROCESSOR, bool GROUPED>
__global__ void __launch_bounds__(32 * WARPS, PER_PROCESSOR) coded_matmul(
    const u8* __restrict__ codes, const void* __restrict__ scales, const u16* __restrict__ x,
    const u16* __restrict__ bias, u16* __restrict__ out, i64 num_rows, i64 width, i64 depth,
    i64 code_stride, i64 x_stride, i64 out_stride, i64 early
) {
    int m = num_rows, n = width, k = depth;
    using Own = typename Choice<
        GROUPED, Groups<BITS, ROWS, COLS, WARPS, STEP, STAGES>,
        Warps<BITS, ROWS, COLS, WARPS, STEP, STAGES>>::Type;
    extern __shared__ __align__(1024) u8 shared[];
    u32 stages = shared_address(shared);
    int tiles_m = (m + COLS - 1) / COLS, steps = (k + STEP - 1) / STEP;
    int first_col = blockIdx.x % tiles_m * COLS, first_row = blockIdx.x / tiles_m * ROWS;
    int blocks = (k + BLOCK - 1) / BLOCK;
    let_next_begin();
    if (!early) wait_for_kernels();
    typename Own::CodeCopies copy_codes(
        codes + (i64)first_row * code_stride, code_stride, n - first_row, code_stride);
    typename Own::XCopies copy_x(x + first_col * x_stride, 2 * x_stride, m - first_col, 2 * k);
#pragma unroll 1
    for (int step = 0; step < min(Own::AHEAD, steps); step++)
        copy_codes(stages + step * Own::STAGE + Own::CODE_PLACE, step);
    Own own;
    own.take_factors(0, scales, first_row, n, blocks, 0);
    wait_for_kernels();
#pragma unroll 1
    for (int step = 0; step < Own::AHEAD; step++) {
        if (step < steps) copy_x(stages + step * Own::STAGE, step);
        close_group();
    }
    u32 stage = stages, freed = stages + Own::AHEAD * Own::STAGE;
    u32 end = stages + STAGES * Own::STAGE;
    own.begin();
    for (int step = 0; step < steps; step++) {
        own.take_factors(1, scales, first_row, n, blocks, step + 1);
        wait_for_groups<Own::AHEAD - 1>();
        if constexpr (GROUPED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        int later = step + Own::AHEAD;
        if (later < steps) {
            copy_codes(freed + Own::CODE_PLACE, later);
            copy_x(freed, later);
        }
        close_group();
        own.add_products(stage);
        own.next_factors();
        stage = stage + Own::STAGE == end ? stages : stage + Own::STAGE;
        freed = freed + Own::STAGE == end ? stages : freed + Own::STAGE;
    }
    own.finish();
    own.visit([&](int of_weight, int of_x, float sum) {
        of_weight += first_row;
        of_x += first_col;
        if (of_weight >= n || of_x >= m) return;
        if (bias) sum += as_float(bias[of_weight]);
        out[of_x * out_stride + of_weight] = as_bf16(sum);
    });
}
