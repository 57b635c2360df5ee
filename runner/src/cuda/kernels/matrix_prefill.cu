// Products with many inputs, by tensor cores: weights are widened to f16 in registers, straight into the left operand;
// inputs are f16; sums are f32.
//
// A block has 256 rows (or 128 of gate and the same 128 of up) and up to 64 inputs. Codes and inputs come through
// shared memory, two or three steps of KC columns deep, so that they fit a block's 99 KiB of the smaller chips. The columns of a step are permuted so that the eight weights a lane
// holds of one row in one go are neighbours in the format's bytes; inputs are stored in that order beforehand, eight
// columns (a piece) staying together. A sum's order is that of the columns, whatever else is computed with it.

#define TILE_TOKENS 64
#define TILE_ROWS 256
#define THREADS 256

// The smaller chips have shared memory for one block a multiprocessor.
#if __CUDA_ARCH__ >= 1000
#define BLOCKS 1
#else
#define BLOCKS 2
#endif

static __device__ const u16 d_iq2_xxs[256] = {IQ2_XXS_CODEBOOK};

// Planes of a matrix: [rows, columns].
struct Weights {
    const u8* planes;
    u64 rows;
};

// A byte of each of four as f16: 1024 + byte.
static __device__ __forceinline__ u32 biased(u32 bytes, u32 selector) { return __byte_perm(bytes, 0x64646464u, selector); }

static __device__ __forceinline__ u32 twice(float value) { return floats_to_halves(value, value); }

// Small unsigned codes, four a word: code * factor - minimum.
static __device__ __forceinline__ void widen_codes(u32 first, u32 second, u32 factor, u32 minimum, u32* w) {
    const u32 bias = 0x64006400u;
    w[0] = fma_halves(subtract_halves(biased(first, 0x4140), bias), factor, minimum);
    w[1] = fma_halves(subtract_halves(biased(first, 0x4342), bias), factor, minimum);
    w[2] = fma_halves(subtract_halves(biased(second, 0x4140), bias), factor, minimum);
    w[3] = fma_halves(subtract_halves(biased(second, 0x4342), bias), factor, minimum);
}

// Each format: columns a step (KC), steps in shared memory (STAGES), pieces of 16 bytes that a row has in a step, and how
// far rows lie apart in shared memory. `piece` says where a piece comes from, `scales` where four more bytes come from.
// `widen` gives, from both in shared memory, eight weights of one of KC / 32 parts of a step; `odd` is `odd(row)`.
struct Iq2Xxs {
    static constexpr int KC = 128, STAGES = 3, PIECES = 2, PITCH = 32, TABLE_BYTES = 4096;
    static constexpr bool SCALES = true;
    static __device__ void fill(uint4* table) {
        for (u32 i = threadIdx.x; i < 256; i += THREADS) {
            u32 halves[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 codes = d_iq2_xxs[i] >> (4 * k);
                float low = (codes & 3) == 0 ? 8.0f : (codes & 3) == 1 ? 25.0f : 43.0f;
                float high = (codes >> 2 & 3) == 0 ? 8.0f : (codes >> 2 & 3) == 1 ? 25.0f : 43.0f;
                halves[k] = floats_to_halves(low, high);
            }
            table[i] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
        }
    }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 step, u32 piece) {
        return w.planes + row * (columns / 4) + step * 32 + piece * 16;
    }
    // The aligned four bytes in which the two of the block are: `odd`, the last two, in odd blocks.
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns, u32 step) {
        return w.planes + w.rows * (columns / 4) + (row * (columns / 256) + step / 2) / 2 * 4;
    }
    static __device__ __forceinline__ bool odd(u32 row, u32 columns) { return row & columns / 256 & 1; }
    static __device__ __forceinline__ void widen(const u8* row, u32 scales, bool odd, u32 step, u32 t, int part,
                                                 const uint4* table, u32* w) {
        u16 d = (u16)((step / 2 % 2 != 0) == odd ? scales : scales >> 16);
        uint2 raw = *(const uint2*)(row + 8 * t);
        u32 factor = twice(half_to_float(d) * 0.125f * (float)((raw.y >> 28) * 2 + 1));
        uint4 g = table[raw.x >> (8 * part) & 255];
        u32 index = raw.y >> (7 * part) & 127, signs = index | (__popc(index) & 1) << 7, pair = signs | signs << 15;
        const u32 top = 0x80008000u;
        w[0] = multiply_halves(g.x ^ (pair << 15 & top), factor);
        w[1] = multiply_halves(g.y ^ (pair << 13 & top), factor);
        w[2] = multiply_halves(g.z ^ (pair << 11 & top), factor);
        w[3] = multiply_halves(g.w ^ (pair << 9 & top), factor);
    }
};

struct Q2K {
    // Codes of half a block, and the scales of all of it.
    static constexpr int KC = 128, STAGES = 2, PIECES = 3, PITCH = 48, TABLE_BYTES = 0;
    static constexpr bool SCALES = true;
    static __device__ void fill(uint4*) {}
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 step, u32 piece) {
        const u8* scales = w.planes + w.rows * (columns / 4) + row * (columns / 16) + step / 2 * 16;
        return piece == 2 ? scales : w.planes + row * (columns / 4) + step * 32 + piece * 16;
    }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns, u32 step) {
        return w.planes + w.rows * (columns / 4 + columns / 16) + (row * (columns / 256) + step / 2) * 4;
    }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    // Lane t has sub-block t % 2 of the half block, and half t / 2 of that.
    static __device__ __forceinline__ void widen(const u8* row, u32 dm, bool, u32 step, u32 t, int part, const uint4*,
                                                 u32* w) {
        uint2 raw = *(const uint2*)(row + t % 2 * 16 + t / 2 * 8);
        u32 pair = row[32 + step % 2 * 8 + t % 2 * 4 + part];
        u32 factor = twice(half_to_float((u16)dm) * (float)(pair & 15));
        u32 minimum = twice(-half_to_float((u16)(dm >> 16)) * (float)(pair >> 4));
        widen_codes(raw.x >> (2 * part) & 0x03030303u, raw.y >> (2 * part) & 0x03030303u, factor, minimum, w);
    }
};

struct Q4K {
    // Codes of half a block, and its head: d, dmin and twelve bytes of 6-bit scales and minima.
    static constexpr int KC = 128, STAGES = 2, PIECES = 5, PITCH = 80, TABLE_BYTES = 0;
    static constexpr bool SCALES = false;
    static __device__ void fill(uint4*) {}
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 step, u32 piece) {
        const u8* heads = w.planes + w.rows * (columns / 2) + row * (columns / 16) + step / 2 * 16;
        return piece == 4 ? heads : w.planes + row * (columns / 2) + step * 64 + piece * 16;
    }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns, u32 step) {
        return nullptr;
    }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    // Lane t has half t % 2 of chunk 2 (step % 2) + t / 2 of the block; parts are low nibbles, then high ones.
    static __device__ __forceinline__ void widen(const u8* row, u32, bool, u32 step, u32 t, int part, const uint4*,
                                                 u32* w) {
        uint2 raw = *(const uint2*)(row + 16 * t + part % 2 * 8);
        uint4 head = *(const uint4*)(row + 64);
        u32 q = step % 2 * 2 + t / 2, shift = q % 2 * 16 + part / 2 * 8, scale, minimum;
        if (q < 2) {
            scale = head.y >> shift & 63;
            minimum = head.z >> shift & 63;
        } else {
            scale = (head.w >> shift & 15) | (head.y >> shift >> 2 & 0x30);
            minimum = (head.w >> shift >> 4 & 15) | (head.z >> shift >> 2 & 0x30);
        }
        widen_codes(raw.x >> (part / 2 * 4) & 0x0f0f0f0fu, raw.y >> (part / 2 * 4) & 0x0f0f0f0fu,
                    twice(half_to_float((u16)head.x) * (float)scale),
                    twice(-half_to_float((u16)(head.x >> 16)) * (float)minimum), w);
    }
};

struct Mxfp4 {
    static constexpr int KC = 128, STAGES = 2, PIECES = 4, PITCH = 64, TABLE_BYTES = 0;
    static constexpr bool SCALES = true;
    static __device__ void fill(uint4*) {}
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 step, u32 piece) {
        return w.planes + row * (columns / 2) + step * 64 + piece * 16;
    }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns, u32 step) {
        return w.planes + w.rows * (columns / 2) + row * (columns / 32) + step * 4;
    }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    // Two codes, in the high bytes of two halves: sign, exponent and mantissa put where f16 has them give 2^-14 times the
    // value. Two products, so that no scale whose values fit f16 overflows by itself.
    static __device__ __forceinline__ u32 value(u32 codes, u32 scale) {
        const u32 two_to_14 = 0x74007400u;
        u32 small = (codes << 1 & 0x0e000e00u) | (codes << 4 & 0x80008000u);
        return multiply_halves(multiply_halves(small, two_to_14), scale);
    }
    static __device__ __forceinline__ void widen(const u8* row, u32 exponents, bool, u32, u32 t, int part, const uint4*,
                                                 u32* w) {
        u32 exponent = exponents >> (8 * t) & 255;
        uint2 raw = *(const uint2*)(row + 16 * t + part % 2 * 8);
        u32 first = raw.x >> (part / 2 * 4) & 0x0f0f0f0fu, second = raw.y >> (part / 2 * 4) & 0x0f0f0f0fu;
        u32 scale = twice(__uint_as_float(exponent << 23));
        w[0] = value(__byte_perm(first, 0, 0x1404), scale);
        w[1] = value(__byte_perm(first, 0, 0x3424), scale);
        w[2] = value(__byte_perm(second, 0, 0x1404), scale);
        w[3] = value(__byte_perm(second, 0, 0x3424), scale);
    }
};

struct Q8_0 {
    static constexpr int KC = 64, STAGES = 3, PIECES = 4, PITCH = 64, TABLE_BYTES = 0;
    static constexpr bool SCALES = true;
    static __device__ void fill(uint4*) {}
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 step, u32 piece) {
        return w.planes + row * columns + step * 64 + piece * 16;
    }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns, u32 step) {
        return w.planes + w.rows * columns + row * (columns / 16) + step * 4;
    }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    static __device__ __forceinline__ void widen(const u8* row, u32 scales, bool, u32, u32 t, int part, const uint4*,
                                                 u32* w) {
        uint2 raw = *(const uint2*)(row + 16 * t + 8 * part);
        u32 first = raw.x ^ 0x80808080u, second = raw.y ^ 0x80808080u;
        // 1024 + 128.
        const u32 bias = 0x64806480u;
        u32 factor = __byte_perm(scales, 0, t / 2 ? 0x3232 : 0x1010);
        w[0] = multiply_halves(subtract_halves(biased(first, 0x4140), bias), factor);
        w[1] = multiply_halves(subtract_halves(biased(first, 0x4342), bias), factor);
        w[2] = multiply_halves(subtract_halves(biased(second, 0x4140), bias), factor);
        w[3] = multiply_halves(subtract_halves(biased(second, 0x4342), bias), factor);
    }
};

struct F16 {
    static constexpr int KC = 32, STAGES = 3, PIECES = 4, PITCH = 64, TABLE_BYTES = 0;
    static constexpr bool SCALES = false;
    static __device__ void fill(uint4*) {}
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 step, u32 piece) {
        return w.planes + row * (2 * columns) + step * 64 + piece * 16;
    }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns, u32 step) {
        return nullptr;
    }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    static __device__ __forceinline__ void widen(const u8* row, u32, bool, u32, u32 t, int, const uint4*, u32* w) {
        uint4 v = *(const uint4*)(row + 16 * t);
        w[0] = v.x;
        w[1] = v.y;
        w[2] = v.z;
        w[3] = v.w;
    }
};

// Inputs of a tile: f16 rows of `stride` values; input n is row rows[n] (shared memory) for n < count.
struct Inputs {
    const u16* values;
    u64 stride;
    // Volatile, so that addresses made of them are not kept in registers.
    const volatile u32* rows;
    u32 count;
};

// Where in shared memory the stages are.
template <class F> struct Stages {
    static constexpr int CODES = TILE_ROWS * F::PITCH;
    // Eight lanes that read together meet every bank once.
    static constexpr int INPUT_PITCH = F::KC == 32 ? 64 : F::KC * 2 + 64;
    // Where scales begin.
    static constexpr int SCALES = CODES + TILE_TOKENS * INPUT_PITCH;
    static constexpr int BYTES = SCALES + (F::SCALES ? TILE_ROWS * 4 : 0);
    static constexpr int ALL_BYTES = F::STAGES * BYTES;
};

// Which rows a tile has, in shared memory: a row of a matrix, and in the top bit which of two matrices.
// Local rows 32 w .. 32 w + 15 are m = 0 of warp w, the next 16 are m = 1.
typedef u32 TileRows[TILE_ROWS];
#define SECOND 0x80000000u

// sums[m][n] of the warp's 16 rows m and 8 inputs n.
template <class F>
static __device__ __forceinline__ void tile(float (&sums)[2][8][4], const Weights& first, const Weights& second,
                                            const TileRows& rows, u32 columns, const Inputs& x, u8* memory,
                                            const uint4* table) {
    // Opaque, so that nothing made of them is computed before a loop over tiles and kept in registers all the while.
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(columns));
    const u32 lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const u32 steps = columns / F::KC, input_tiles = (x.count + 7) / 8;
    constexpr int INPUT_PIECES = F::KC / 8, SLOTS = F::PIECES > 4 ? 8 : F::PIECES > 2 ? 4 : 2;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
    auto fetch = [&](u32 step, u8* stage) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            u32 index = i * THREADS + thread, local = index / SLOTS, piece = index % SLOTS, row = rows[local];
            if (piece < F::PIECES) {
                copy_async(shared_address(stage + local * F::PITCH + piece * 16),
                           F::piece(row & SECOND ? second : first, row & ~SECOND, columns, step, piece));
            }
        }
        if (F::SCALES) {
            u32 row = rows[thread];
            copy_word_async(shared_address(stage + Stages<F>::SCALES + thread * 4),
                            F::scales(row & SECOND ? second : first, row & ~SECOND, columns, step));
        }
#pragma unroll
        for (int i = 0; i < TILE_TOKENS * INPUT_PIECES / THREADS; i++) {
            u32 n = (i * THREADS + thread) / INPUT_PIECES, piece = thread % INPUT_PIECES;
            if (n < input_tiles * 8) {
                bool inside = n < x.count;
                const u16* from = x.values + x.rows[inside ? n : 0] * x.stride + step * F::KC + piece * 8;
                copy_async_or_zero(
                    shared_address(stage + Stages<F>::CODES + n * Stages<F>::INPUT_PITCH + piece * 16), from, inside);
            }
        }
    };
    // Of the four rows of this lane: g and g + 8 of both m.
    u32 odd = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) odd |= F::odd(rows[warp * 32 + r * 8 + g], columns) ? 1u << r : 0;
#pragma unroll
    for (int stage = 0; stage < F::STAGES - 1; stage++) {
        if (stage < steps) fetch(stage, memory + stage * Stages<F>::BYTES);
        copies_commit();
    }
    // Where the step to be computed lies, and where the step that is fetched meanwhile is put.
    u32 own = 0, fetched = (F::STAGES - 1) * Stages<F>::BYTES;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        copies_wait<F::STAGES - 2>();
        __syncthreads();
        if (step + F::STAGES - 1 < steps) fetch(step + F::STAGES - 1, memory + fetched);
        copies_commit();
        fetched = own;
        const u8* codes = memory + own;
        own = own == (F::STAGES - 1) * Stages<F>::BYTES ? 0 : own + Stages<F>::BYTES;
        const u8* inputs = codes + Stages<F>::CODES + g * Stages<F>::INPUT_PITCH + t * 16;
        const u32* scales = (const u32*)(codes + Stages<F>::SCALES) + warp * 32 + g;
        codes += (warp * 32 + g) * F::PITCH;
        // Unrolled, the parts would need more registers than there are.
#pragma unroll 1
        for (int part = 0; part < F::KC / 32; part++) {
            // Left operands: of the first four weights of each lane, then of the other four.
            u32 a[2][2][4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                u32 w[4];
                u32 scale = F::SCALES ? scales[r * 8] : 0;
                F::widen(codes + r * 8 * F::PITCH, scale, odd >> r & 1, step, t, part, table, w);
                a[r / 2][0][r % 2] = w[0];
                a[r / 2][0][2 + r % 2] = w[1];
                a[r / 2][1][r % 2] = w[2];
                a[r / 2][1][2 + r % 2] = w[3];
            }
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (n < input_tiles) {
                    uint4 b = *(const uint4*)(inputs + n * 8 * Stages<F>::INPUT_PITCH + part * 64);
                    multiply_tile(sums[0][n], a[0][0], b.x, b.y);
                    multiply_tile(sums[1][n], a[1][0], b.x, b.y);
                    multiply_tile(sums[0][n], a[0][1], b.z, b.w);
                    multiply_tile(sums[1][n], a[1][1], b.z, b.w);
                }
            }
        }
    }
    copies_wait<0>();
    __syncthreads();
}

// out[token, row] = matrix[row, .] . x[token, group of the row, .].
// Grid: (token tiles, row tiles of a group, groups).
template <class F>
static __device__ __forceinline__ void dense(const Weights& matrix, const u16* x, u64 stride, u32 columns, u32 group_rows,
                                             u32 tokens, float* out) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[TILE_TOKENS];
    __shared__ TileRows rows;
    const u32 first_token = blockIdx.x * TILE_TOKENS, first = blockIdx.y * TILE_ROWS, group = blockIdx.z;
    if (threadIdx.x < TILE_TOKENS) rows_of_x[threadIdx.x] = first_token + threadIdx.x;
    rows[threadIdx.x] = group * group_rows + min(first + threadIdx.x, group_rows - 1);
    u8* memory = (u8*)shared_memory;
    F::fill((uint4*)(memory + Stages<F>::ALL_BYTES));
    __syncthreads();
    Inputs inputs = {x + (u64)group * columns, stride, rows_of_x, min(tokens - first_token, (u32)TILE_TOKENS)};
    float sums[2][8][4];
    tile<F>(sums, matrix, matrix, rows, columns, inputs, memory, (const uint4*)(memory + Stages<F>::ALL_BYTES));
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first + warp * 32 + m * 16 + i / 2 * 8 + g, token = n * 8 + t * 2 + i % 2;
                if (row < group_rows && token < inputs.count) {
                    out[(u64)(first_token + token) * matrix.rows + (u64)group * group_rows + row] = sums[m][n][i];
                }
            }
        }
    }
}

// Items sorted by expert: starts[e] .. starts[e + 1] are those of expert e, in the order of `order`.
// Tiles of all experts: before[e] (shared memory) counts the tiles of the experts before e.
static __device__ __forceinline__ u32 count_tiles(const u32* starts, u32 n_experts, u32* before) {
    __shared__ u32 warp_sums[THREADS / WARP];
    __shared__ u32 total;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (u32 base = 0; base < n_experts; base += THREADS) {
        u32 e = base + threadIdx.x;
        u32 own = e < n_experts ? (starts[e + 1] - starts[e] + TILE_TOKENS - 1) / TILE_TOKENS : 0, sum = own;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            u32 other = __shfl_up_sync(ALL_LANES, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (lane == WARP - 1) warp_sums[warp] = sum;
        __syncthreads();
        u32 earlier = total;
        for (u32 w = 0; w < warp; w++) earlier += warp_sums[w];
        if (e < n_experts) before[e] = earlier + sum - own;
        __syncthreads();
        if (threadIdx.x == THREADS - 1) total = earlier + sum;
        __syncthreads();
    }
    return total;
}

// The last expert whose tiles begin at or before `tile`.
static __device__ __forceinline__ u32 expert_of(const u32* before, u32 n_experts, u32 tile) {
    u32 low = 0, high = n_experts;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (before[middle] <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Place of a column among those of its step in the order that a format wants; `pieces` has a hexadecimal digit for each
// piece of eight columns.
static __device__ __forceinline__ u32 permuted(u32 column, u64 pieces, u32 step_columns) {
    u32 within = column % step_columns;
    return column - within + (u32)(pieces >> (within / 8 * 4) & 15) * 8 + within % 8;
}

// What the kernels for experts share.
struct Sorted {
    const u32* starts;
    // Item at each place.
    const u32* order;
    u32 n_experts;
    u32 unused;
};

// A tile of the work of `gate_up` and `down`, in shared memory: what is needed again behind the products need not stay in
// registers meanwhile.
struct Tile {
    u32 expert;
    u32 first_row;
    u32 place;
    u32 count;
};

// Tile `index` of those of all experts; tiles of the same weights follow each other.
static __device__ __forceinline__ void find_tile(volatile Tile& tile, const Sorted& sorted, const u32* before, u32 index,
                                                 u32 row_tiles, u32 tile_rows) {
    u32 expert = expert_of(before, sorted.n_experts, index / row_tiles);
    u32 start = sorted.starts[expert], end = sorted.starts[expert + 1];
    u32 expert_tiles = (end - start + TILE_TOKENS - 1) / TILE_TOKENS, within = index - before[expert] * row_tiles;
    u32 place = start + within % expert_tiles * TILE_TOKENS;
    tile.expert = expert;
    tile.first_row = within / expert_tiles * tile_rows;
    tile.place = place;
    tile.count = min(end - place, (u32)TILE_TOKENS);
}

// mids[place, .] = weight * swiglu(gate x, up x) as f16, in the order that the down product wants;
// plain[item, .]: without the weight, f32, if wanted. A block takes tiles in turn.
template <class F>
static __device__ __forceinline__ void gate_up(const Weights& gate, const Weights& up, const Sorted& sorted, const u16* x,
                                               u32 n_used, const float* weights, u32 columns, u32 rows, float limit,
                                               u64 pieces, u32 step_columns, u16* mids, float* plain) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[TILE_TOKENS], items[TILE_TOKENS];
    __shared__ TileRows tile_rows;
    __shared__ volatile Tile now;
    u8* memory = (u8*)shared_memory;
    uint4* table = (uint4*)(memory + Stages<F>::ALL_BYTES);
    u32* before = (u32*)((u8*)table + F::TABLE_BYTES);
    F::fill(table);
    const u32 row_tiles = (rows + 127) / 128, tiles = count_tiles(sorted.starts, sorted.n_experts, before) * row_tiles;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (threadIdx.x == 0) find_tile(now, sorted, before, index, row_tiles, 128);
        __syncthreads();
        if (threadIdx.x < now.count) {
            u32 item = sorted.order[now.place + threadIdx.x];
            items[threadIdx.x] = item;
            rows_of_x[threadIdx.x] = item / n_used;
        }
        u32 row = min(now.first_row + threadIdx.x / 32 * 16 + threadIdx.x % 16, rows - 1);
        tile_rows[threadIdx.x] = (now.expert * rows + row) | (threadIdx.x / 16 % 2 ? SECOND : 0);
        __syncthreads();
        Inputs inputs = {x, columns, rows_of_x, now.count};
        float sums[2][8][4];
        tile<F>(sums, gate, up, tile_rows, columns, inputs, memory, table);
        const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 row = now.first_row + warp * 16 + i / 2 * 8 + g, column = permuted(row, pieces, step_columns);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    u32 token = n * 8 + t * 2 + j;
                    if (row < rows && token < now.count) {
                        float mid = swiglu(sums[0][n][i + j], sums[1][n][i + j], limit);
                        u32 item = items[token];
                        if (plain) plain[(u64)item * rows + row] = mid;
                        mids[(u64)(now.place + token) * rows + column] = float_to_half(mid * weights[item]);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// parts[item, .] = down(expert of the item) . mids[place, .]. A block takes tiles in turn.
template <class F>
static __device__ __forceinline__ void down(const Weights& matrix, const Sorted& sorted, const u16* mids, u32 columns,
                                            u32 rows, float* parts) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[TILE_TOKENS], items[TILE_TOKENS];
    __shared__ TileRows tile_rows;
    __shared__ volatile Tile now;
    u8* memory = (u8*)shared_memory;
    uint4* table = (uint4*)(memory + Stages<F>::ALL_BYTES);
    u32* before = (u32*)((u8*)table + F::TABLE_BYTES);
    F::fill(table);
    const u32 row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const u32 tiles = count_tiles(sorted.starts, sorted.n_experts, before) * row_tiles;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (threadIdx.x == 0) find_tile(now, sorted, before, index, row_tiles, TILE_ROWS);
        __syncthreads();
        if (threadIdx.x < now.count) {
            items[threadIdx.x] = sorted.order[now.place + threadIdx.x];
            rows_of_x[threadIdx.x] = now.place + threadIdx.x;
        }
        tile_rows[threadIdx.x] = now.expert * rows + min(now.first_row + threadIdx.x, rows - 1);
        __syncthreads();
        Inputs inputs = {mids, columns, rows_of_x, now.count};
        float sums[2][8][4];
        tile<F>(sums, matrix, matrix, tile_rows, columns, inputs, memory, table);
        const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 row = now.first_row + warp * 32 + m * 16 + i / 2 * 8 + g, token = n * 8 + t * 2 + i % 2;
                    if (row < rows && token < now.count) parts[(u64)items[token] * rows + row] = sums[m][n][i];
                }
            }
        }
        __syncthreads();
    }
}

#define DENSE(NAME, F)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) dense_##NAME(                                            \
        const __grid_constant__ Weights matrix, const u16* x, u64 stride, u32 columns, u32 group_rows, u32 tokens,    \
        float* out) {                                                                                                 \
        dense<F>(matrix, x, stride, columns, group_rows, tokens, out);                                                \
    }

#define EXPERTS(NAME, F)                                                                                              \
    DENSE(NAME, F)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gate_up_##NAME(                                          \
        const __grid_constant__ Weights gate, const __grid_constant__ Weights up,                                     \
        const __grid_constant__ Sorted sorted, const u16* x, u32 n_used, const float* weights, u32 columns, u32 rows, \
        float limit, u64 pieces, u32 step_columns, u16* mids, float* plain) {                                         \
        gate_up<F>(gate, up, sorted, x, n_used, weights, columns, rows, limit, pieces, step_columns, mids, plain);    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) down_##NAME(                                             \
        const __grid_constant__ Weights matrix, const __grid_constant__ Sorted sorted, const u16* mids, u32 columns,  \
        u32 rows, float* parts) {                                                                                     \
        down<F>(matrix, sorted, mids, columns, rows, parts);                                                          \
    }

DENSE(Q8_0, Q8_0)
DENSE(F16, F16)
EXPERTS(IQ2_XXS, Iq2Xxs)
EXPERTS(Q2_K, Q2K)
EXPERTS(Q4_K, Q4K)
EXPERTS(MXFP4, Mxfp4)

// halves[row, .] = values[row, .] as f16, pieces of eight columns in the order that a format wants.
extern "C" __global__ void __launch_bounds__(256) to_halves(const float* values, u64 n, u64 pieces, u32 step_columns,
                                                            u16* halves) {
    u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= n) return;
    float4 a = *(const float4*)(values + i), b = *(const float4*)(values + i + 4);
    u32 within = i % step_columns;
    u64 place = i - within + (u32)(pieces >> (within / 8 * 4) & 15) * 8;
    *(uint4*)(halves + place) = make_uint4(floats_to_halves(a.x, a.y), floats_to_halves(a.z, a.w),
                                           floats_to_halves(b.x, b.y), floats_to_halves(b.z, b.w));
}

// Sorts items by expert, keeping their order within one: starts[n_experts + 1] and order[n]. A block has one expert; it
// counts the items of the experts before its own, so that blocks need not wait for each other.
extern "C" __global__ void __launch_bounds__(256) sort_by_expert(const u32* experts, u32 n, u32 n_experts, u32* starts,
                                                                 u32* order) {
    __shared__ u32 before[THREADS / WARP], own[THREADS / WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = THREADS / WARP, expert = blockIdx.x;
    const u32 share = (n + warps - 1) / warps, begin = min(warp * share, n), end = min(begin + share, n);
    u32 less = 0, equal = 0;
    for (u32 i = begin; i < end; i += WARP) {
        u32 id = i + lane < end ? experts[i + lane] : ALL_LANES;
        less += __popc(__ballot_sync(ALL_LANES, id < expert));
        equal += __popc(__ballot_sync(ALL_LANES, id == expert));
    }
    if (lane == 0) {
        before[warp] = less;
        own[warp] = equal;
    }
    __syncthreads();
    u32 start = 0, place = 0, total = 0;
    for (u32 w = 0; w < warps; w++) {
        start += before[w];
        if (w < warp) place += own[w];
        total += own[w];
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert == n_experts - 1) starts[n_experts] = start + total;
    }
    place += start;
    for (u32 i = begin; i < end; i += WARP) {
        bool mine = i + lane < end && experts[i + lane] == expert;
        u32 all = __ballot_sync(ALL_LANES, mine);
        if (mine) order[place + __popc(all & ((1u << lane) - 1))] = i + lane;
        place += __popc(all);
    }
}
