// How the kernels for many tokens read each format, and what their blocks are.

// Instructions that only compute capability 9.0 has, and the code only if it is compiled for just that one.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WARP_GROUPS 1
#else
#define WARP_GROUPS 0
#endif

// Threads of a block, which has a multiprocessor for itself, and what it computes at once: of a dense matrix, and of an expert,
// for which there are few tokens. Rows of an expert are as many as threads.
#if WARP_GROUPS
#define THREADS 512
#define DENSE_TOKENS 128
#else
#define THREADS 256
#define DENSE_TOKENS 64
#endif
#define DENSE_ROWS 256
#define EXPERT_TOKENS 64

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
// `load` takes what a lane needs of a step of a row from shared memory, `widen` gives eight weights of one of its KC / 32 parts;
// `odd` is `odd(row)`.
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
    struct Raw {
        uint2 codes;
        u32 factor;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 scales, bool odd, u32 step, u32 t) {
        u16 d = (u16)((step / 2 % 2 != 0) == odd ? scales : scales >> 16);
        uint2 codes = *(const uint2*)(row + 8 * t);
        return {codes, twice(half_to_float(d) * 0.125f * (float)((codes.y >> 28) * 2 + 1))};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, const uint4* table, u32* w) {
        u32 factor = raw.factor;
        uint4 g = table[raw.codes.x >> (8 * part) & 255];
        u32 index = raw.codes.y >> (7 * part) & 127, signs = index | (__popc(index) & 1) << 7, pair = signs | signs << 15;
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
    struct Raw {
        uint2 codes;
        u32 pairs;
        float d;
        float minus_dmin;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 dm, bool, u32 step, u32 t) {
        uint2 codes = *(const uint2*)(row + t % 2 * 16 + t / 2 * 8);
        u32 pairs = *(const u32*)(row + 32 + step % 2 * 8 + t % 2 * 4);
        return {codes, pairs, half_to_float((u16)dm), -half_to_float((u16)(dm >> 16))};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, const uint4*, u32* w) {
        u32 pair = raw.pairs >> (8 * part) & 255;
        u32 factor = twice(raw.d * (float)(pair & 15)), minimum = twice(raw.minus_dmin * (float)(pair >> 4));
        widen_codes(raw.codes.x >> (2 * part) & 0x03030303u, raw.codes.y >> (2 * part) & 0x03030303u, factor, minimum, w);
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
    struct Raw {
        uint4 codes;
        // Of low and high nibbles.
        u32 factors[2];
        u32 minima[2];
    };
    // Lane t has half t % 2 of chunk 2 (step % 2) + t / 2 of the block; parts are low nibbles, then high ones.
    static __device__ __forceinline__ Raw load(const u8* row, u32, bool, u32 step, u32 t) {
        Raw raw;
        raw.codes = *(const uint4*)(row + 16 * t);
        uint4 head = *(const uint4*)(row + 64);
        u32 q = step % 2 * 2 + t / 2;
        float d = half_to_float((u16)head.x), minus_dmin = -half_to_float((u16)(head.x >> 16));
#pragma unroll
        for (int high = 0; high < 2; high++) {
            u32 shift = q % 2 * 16 + high * 8;
            u32 near_scale = head.y >> shift & 63, near_minimum = head.z >> shift & 63;
            u32 far_scale = (head.w >> shift & 15) | (head.y >> shift >> 2 & 0x30);
            u32 far_minimum = (head.w >> shift >> 4 & 15) | (head.z >> shift >> 2 & 0x30);
            raw.factors[high] = twice(d * (float)(q < 2 ? near_scale : far_scale));
            raw.minima[high] = twice(minus_dmin * (float)(q < 2 ? near_minimum : far_minimum));
        }
        return raw;
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, const uint4*, u32* w) {
        u32 first = part % 2 ? raw.codes.z : raw.codes.x, second = part % 2 ? raw.codes.w : raw.codes.y;
        u32 factor = part / 2 ? raw.factors[1] : raw.factors[0], minimum = part / 2 ? raw.minima[1] : raw.minima[0];
        widen_codes(first >> (part / 2 * 4) & 0x0f0f0f0fu, second >> (part / 2 * 4) & 0x0f0f0f0fu, factor, minimum, w);
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
    struct Raw {
        uint4 codes;
        u32 scale;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 exponents, bool, u32, u32 t) {
        return {*(const uint4*)(row + 16 * t), twice(__uint_as_float((exponents >> (8 * t) & 255) << 23))};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, const uint4*, u32* w) {
        u32 first = (part % 2 ? raw.codes.z : raw.codes.x) >> (part / 2 * 4) & 0x0f0f0f0fu;
        u32 second = (part % 2 ? raw.codes.w : raw.codes.y) >> (part / 2 * 4) & 0x0f0f0f0fu;
        u32 scale = raw.scale;
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
    struct Raw {
        uint4 codes;
        u32 factor;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 scales, bool, u32, u32 t) {
        return {*(const uint4*)(row + 16 * t), __byte_perm(scales, 0, t / 2 ? 0x3232 : 0x1010)};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, const uint4*, u32* w) {
        u32 first = (part ? raw.codes.z : raw.codes.x) ^ 0x80808080u, second = (part ? raw.codes.w : raw.codes.y) ^ 0x80808080u;
        // 1024 + 128.
        const u32 bias = 0x64806480u;
        u32 factor = raw.factor;
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
    struct Raw {
        uint4 weights;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32, bool, u32, u32 t) {
        return {*(const uint4*)(row + 16 * t)};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int, const uint4*, u32* w) {
        w[0] = raw.weights.x;
        w[1] = raw.weights.y;
        w[2] = raw.weights.z;
        w[3] = raw.weights.w;
    }
};

