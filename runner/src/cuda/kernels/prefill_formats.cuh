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

// Half of the 16 bytes of codes that lie in shared memory: they are fetched when they are wanted, for want of registers.
static __device__ __forceinline__ uint2 codes_at(u32 place, int half) {
    uint2 codes;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(codes.x), "=r"(codes.y) : "r"(place + half * 8));
    return codes;
}

static __device__ __forceinline__ u32 twice(float value) { return floats_to_halves(value, value); }

// Small unsigned codes, 2^SHIFT times each in a byte, four a word: code * factor - minimum.
template <int SHIFT>
static __device__ __forceinline__ void widen_codes(u32 first, u32 second, u32 factor, u32 minimum, u32* w) {
    // 1024 + code * 2^SHIFT, less that 1024.
    auto code = [](u32 halves) {
        const u32 bias = 0x64006400u, part = 0x3c003c00u - SHIFT * 0x04000400u, bias_part = 0xe400e400u - SHIFT * 0x04000400u;
        return SHIFT ? fma_halves(halves, part, bias_part) : subtract_halves(halves, bias);
    };
    w[0] = fma_halves(code(biased(first, 0x4140)), factor, minimum);
    w[1] = fma_halves(code(biased(first, 0x4342)), factor, minimum);
    w[2] = fma_halves(code(biased(second, 0x4140)), factor, minimum);
    w[3] = fma_halves(code(biased(second, 0x4342)), factor, minimum);
}

// Bytes in offset binary, four a word: (byte - 128) * factor.
static __device__ __forceinline__ void widen_bytes(u32 first, u32 second, u32 factor, u32* w) {
    // 1024 + 128.
    const u32 bias = 0x64806480u;
    w[0] = multiply_halves(subtract_halves(biased(first, 0x4140), bias), factor);
    w[1] = multiply_halves(subtract_halves(biased(first, 0x4342), bias), factor);
    w[2] = multiply_halves(subtract_halves(biased(second, 0x4140), bias), factor);
    w[3] = multiply_halves(subtract_halves(biased(second, 0x4342), bias), factor);
}

// Each format: columns a step (KC), steps in shared memory (STAGES), pieces of 16 bytes that a row has in a step, and how
// far rows lie apart in shared memory. `piece` says where a piece of the first step comes from, `stride` how far the next row's
// is, `advance` how far a later step's; `scales` and `scales_advance` the same of four more bytes.
// `place` is where a piece lies among those of its row in shared memory. `load` takes what a lane needs of a step of a row
// from there, `refill` the codes of a turn, `widen` gives eight weights of one of its KC / 32 parts, whose order is
// `part(turn)`; `odd` is `odd(row)`. AS_STORED: what `widen` gives is what was loaded.

// What formats have in common that have nothing special: no table, parts in order, and all of a row's codes in registers.
struct Plain {
    static constexpr bool AS_STORED = false;
    static __device__ __forceinline__ u32 place(u32, u32 piece) { return piece; }
    static __device__ __forceinline__ constexpr int part(int turn) { return turn; }
    template <class Raw> static __device__ __forceinline__ void refill(Raw&, int) {}
};

// Formats of nibbles: low and high ones of the same bytes follow each other, and bytes are fetched when it is their turn.
struct Nibbles {
    static constexpr bool AS_STORED = false;
    static __device__ __forceinline__ u32 place(u32, u32 piece) { return piece; }
    static __device__ __forceinline__ constexpr int part(int turn) { return turn % 2 * 2 + turn / 2; }
    template <class Raw> static __device__ __forceinline__ void refill(Raw& raw, int turn) {
        if (turn % 2 == 0) raw.codes = codes_at(raw.place, turn / 2);
    }
};

struct NoTable {
    __device__ __forceinline__ NoTable(const u8*) {}
};

struct Iq2Xxs : Plain {
    // Both tables hold selectors of a byte permutation, a nibble a value: which magnitude, and from which side. Copies of
    // each entry lie side by side and lanes read copies of their own, so that few or none meet in a bank.
    static constexpr int COPIES = WARP_GROUPS ? 32 : 16, GRID_BYTES = 256 * 4 * COPIES;
    static constexpr int KC = 128, STAGES = WARP_GROUPS ? 4 : 2, PIECES = 2, PITCH = 32;
    static constexpr int SIGN_BYTES = 128 * 4 * COPIES, TABLE_BYTES = GRID_BYTES + SIGN_BYTES + WARP * 8;
    static constexpr bool SCALES = true;
    // 128 plus and 128 minus the magnitudes.
    static constexpr u32 POSITIVE = 0x00ab9988u, NEGATIVE = 0x00556778u;
    // What a lane keeps in registers, from memory: what the compiler can work out, it works out anew for every lookup.
    struct Table {
        u32 positive;
        // Shared memory: the lane's copy of the first entry.
        u32 own;
        __device__ __forceinline__ Table(const u8* table) {
            volatile const u32* kept = (const u32*)(table + GRID_BYTES + SIGN_BYTES) + threadIdx.x % WARP * 2;
            positive = kept[0];
            own = kept[1];
        }
        template <int OFFSET> __device__ __forceinline__ u32 entry(u32 number) const {
            u32 selectors;
            asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(selectors) : "r"(number * (4 * COPIES) + own), "n"(OFFSET));
            return selectors;
        }
    };
    static __device__ void fill(u8* table) {
        for (u32 i = threadIdx.x; i < 256 + 128; i += THREADS) {
            u32 selectors = 0, codes = i < 256 ? d_iq2_xxs[i] : 0, signs = (i - 256) | (__popc(i - 256) & 1) << 7;
#pragma unroll
            for (int k = 0; k < 8; k++) selectors |= i < 256 ? (codes >> (2 * k) & 3) << (4 * k) : (signs >> k & 1) << (4 * k + 2);
            uint4 four = make_uint4(selectors, selectors, selectors, selectors);
#pragma unroll
            for (int copy = 0; copy < COPIES; copy += 4) *(uint4*)(table + (i * COPIES + copy) * 4) = four;
        }
        if (threadIdx.x < WARP) {
            u32* kept = (u32*)(table + GRID_BYTES + SIGN_BYTES) + threadIdx.x * 2;
            kept[0] = POSITIVE;
            kept[1] = shared_address(table + threadIdx.x % COPIES * 4);
        }
    }
    static __device__ __forceinline__ u32 stride(u32 columns, u32) { return columns / 4; }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 piece) {
        return w.planes + row * stride(columns, piece) + piece * 16;
    }
    static __device__ __forceinline__ u32 advance(u32 step, u32) { return step * 32; }
    // The aligned four bytes in which the two of the block are: `odd`, the last two, in odd blocks.
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns) {
        return w.planes + w.rows * (columns / 4) + row * (columns / 256) / 2 * 4;
    }
    static __device__ __forceinline__ u32 scales_advance(u32 step, bool odd) { return (step / 2 + odd) / 2 * 4; }
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
    static __device__ __forceinline__ void widen(const Raw& raw, int part, const Table& table, u32* w) {
        u32 entry = permute(raw.codes.x, 0, 0x4440 | part), signs = raw.codes.y >> (7 * part) & 127;
        u32 selectors = table.entry<0>(entry) | table.entry<GRID_BYTES>(signs);
        u32 low = permute(table.positive, NEGATIVE, selectors), high = permute(table.positive, NEGATIVE, selectors >> 16);
        widen_bytes(low, high, raw.factor, w);
    }
};

struct Q2K : Plain {
    typedef NoTable Table;
    // Codes of half a block, and the scales of all of it.
    static constexpr int KC = 128, STAGES = WARP_GROUPS ? 4 : 2, PIECES = 3, PITCH = 48, TABLE_BYTES = 0;
    static constexpr bool SCALES = true;
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ u32 stride(u32 columns, u32 piece) { return piece == 2 ? columns / 16 : columns / 4; }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 piece) {
        return w.planes + (piece == 2 ? w.rows * (columns / 4) : piece * 16) + row * stride(columns, piece);
    }
    static __device__ __forceinline__ u32 advance(u32 step, u32 piece) { return piece == 2 ? step / 2 * 16 : step * 32; }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns) {
        return w.planes + w.rows * (columns / 4 + columns / 16) + row * (columns / 256) * 4;
    }
    static __device__ __forceinline__ u32 scales_advance(u32 step, bool) { return step / 2 * 4; }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    // Lane t has sub-block t % 2 of the half block, and half t / 2 of that.
    struct Raw {
        uint2 codes;
        // Of four sub-blocks: scales and minima, in bytes.
        u32 scales;
        u32 minima;
        // d and -dmin.
        u32 factors;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 dm, bool, u32 step, u32 t) {
        uint2 codes = *(const uint2*)(row + t % 2 * 16 + t / 2 * 8);
        u32 pairs = *(const u32*)(row + 32 + step % 2 * 8 + t % 2 * 4);
        return {codes, pairs & 0x0f0f0f0fu, pairs >> 4 & 0x0f0f0f0fu, dm ^ 0x80000000u};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, Table, u32* w) {
        const u32 bias = 0x64006400u, mask = 0x03030303u << (2 * part);
        // Scale and minimum as halves.
        u32 both = permute(raw.scales, raw.minima, 0x0400 | part << 8 | part) & 0x00ff00ffu | bias;
        both = multiply_halves(subtract_halves(both, bias), raw.factors);
        u32 factor = permute(both, 0, 0x1010), minimum = permute(both, 0, 0x3232);
        u32 first = raw.codes.x & mask, second = raw.codes.y & mask;
        switch (part) {
        case 0: return widen_codes<0>(first, second, factor, minimum, w);
        case 1: return widen_codes<2>(first, second, factor, minimum, w);
        case 2: return widen_codes<4>(first, second, factor, minimum, w);
        default: return widen_codes<6>(first, second, factor, minimum, w);
        }
    }
};

struct Q4K : Nibbles {
    typedef NoTable Table;
    // Codes of half a block, and its head: d, dmin and twelve bytes of 6-bit scales and minima.
    static constexpr int KC = 128, STAGES = WARP_GROUPS ? 3 : 2, PIECES = 5, PITCH = 80, TABLE_BYTES = 0;
    static constexpr bool SCALES = false;
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ u32 stride(u32 columns, u32 piece) { return piece == 4 ? columns / 16 : columns / 2; }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 piece) {
        return w.planes + (piece == 4 ? w.rows * (columns / 2) : piece * 16) + row * stride(columns, piece);
    }
    static __device__ __forceinline__ u32 advance(u32 step, u32 piece) { return piece == 4 ? step / 2 * 16 : step * 64; }
    static __device__ __forceinline__ const u8* scales(const Weights&, u64, u32) { return nullptr; }
    static __device__ __forceinline__ u32 scales_advance(u32, bool) { return 0; }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    struct Raw {
        u32 place;
        uint2 codes;
        // Of low and high nibbles: scale and negative minimum.
        u32 factors[2];
    };
    // Lane t has half t % 2 of chunk 2 (step % 2) + t / 2 of the block; parts are low nibbles, then high ones.
    static __device__ __forceinline__ Raw load(const u8* row, u32, bool, u32 step, u32 t) {
        Raw raw;
        raw.place = shared_address(row + 16 * t);
        uint4 head = *(const uint4*)(row + 64);
        u32 q = step % 2 * 2 + t / 2;
        const u32 bias = 0x64006400u, d = head.x ^ 0x80000000u;
#pragma unroll
        for (int high = 0; high < 2; high++) {
            u32 shift = q % 2 * 16 + high * 8;
            u32 near_scale = head.y >> shift & 63, near_minimum = head.z >> shift & 63;
            u32 far_scale = (head.w >> shift & 15) | (head.y >> shift >> 2 & 0x30);
            u32 far_minimum = (head.w >> shift >> 4 & 15) | (head.z >> shift >> 2 & 0x30);
            u32 both = q < 2 ? near_scale | near_minimum << 16 : far_scale | far_minimum << 16;
            raw.factors[high] = multiply_halves(subtract_halves(both | bias, bias), d);
        }
        return raw;
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, Table, u32* w) {
        const uint2 codes = raw.codes;
        u32 both = part / 2 ? raw.factors[1] : raw.factors[0];
        u32 factor = permute(both, 0, 0x1010), minimum = permute(both, 0, 0x3232);
        const u32 mask = part / 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu;
        if (part / 2) {
            widen_codes<4>(codes.x & mask, codes.y & mask, factor, minimum, w);
        } else {
            widen_codes<0>(codes.x & mask, codes.y & mask, factor, minimum, w);
        }
    }
};

struct Mxfp4 : Nibbles {
    typedef NoTable Table;
    static constexpr int KC = 128, STAGES = WARP_GROUPS ? 4 : 2, PIECES = 4, PITCH = 64, TABLE_BYTES = 0;
    static constexpr bool SCALES = true;
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ u32 stride(u32 columns, u32) { return columns / 2; }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 piece) {
        return w.planes + row * stride(columns, piece) + piece * 16;
    }
    static __device__ __forceinline__ u32 advance(u32 step, u32) { return step * 64; }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns) {
        return w.planes + w.rows * (columns / 2) + row * (columns / 32);
    }
    static __device__ __forceinline__ u32 scales_advance(u32 step, bool) { return step * 4; }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    // Four codes in the low (or high) nibbles, as halves: all that their low bytes hold are zeros.
    template <bool HIGH> static __device__ __forceinline__ void values(u32 codes, u32 scale, u32* w) {
        // Magnitudes of low and high nibbles in turn.
        const u32 small = 0x3e3c3800u, large = 0x46444240u, selectors = codes & 0x77777777u;
        u32 first = permute(small, large, selectors), second = permute(small, large, selectors >> 16);
        auto value = [&](u32 magnitudes, u32 bytes) {
            u32 signs = permute(codes, 0, bytes);
            u32 halves = permute(magnitudes, 0, HIGH ? 0x3414 : 0x2404) | (HIGH ? signs : signs << 4) & 0x80008000u;
            return multiply_halves(halves, scale);
        };
        w[0] = value(first, 0x1404);
        w[1] = value(second, 0x3424);
    }
    struct Raw {
        u32 place;
        uint2 codes;
        u32 scale;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 exponents, bool, u32, u32 t) {
        return {shared_address(row + 16 * t), {}, twice(__uint_as_float((exponents >> (8 * t) & 255) << 23))};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, Table, u32* w) {
        const uint2 codes = raw.codes;
        if (part / 2) {
            values<true>(codes.x, raw.scale, w);
            values<true>(codes.y, raw.scale, w + 2);
        } else {
            values<false>(codes.x, raw.scale, w);
            values<false>(codes.y, raw.scale, w + 2);
        }
    }
};

struct Q8_0 : Plain {
    typedef NoTable Table;
    static constexpr int KC = 64, STAGES = WARP_GROUPS ? 4 : 3, PIECES = 4, PITCH = 64, TABLE_BYTES = 0;
    static constexpr bool SCALES = true;
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ u32 stride(u32 columns, u32) { return columns; }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 piece) {
        return w.planes + row * stride(columns, piece) + piece * 16;
    }
    static __device__ __forceinline__ u32 advance(u32 step, u32) { return step * 64; }
    static __device__ __forceinline__ const u8* scales(const Weights& w, u64 row, u32 columns) {
        return w.planes + w.rows * columns + row * (columns / 16);
    }
    static __device__ __forceinline__ u32 scales_advance(u32 step, bool) { return step * 4; }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    struct Raw {
        uint4 codes;
        u32 factor;
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32 scales, bool, u32, u32 t) {
        return {*(const uint4*)(row + 16 * t), __byte_perm(scales, 0, t / 2 ? 0x3232 : 0x1010)};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, Table, u32* w) {
        u32 first = (part ? raw.codes.z : raw.codes.x) ^ 0x80808080u, second = (part ? raw.codes.w : raw.codes.y) ^ 0x80808080u;
        widen_bytes(first, second, raw.factor, w);
    }
};

struct F16 : Plain {
    typedef NoTable Table;
    static constexpr int KC = 64, STAGES = WARP_GROUPS ? 4 : 2, PIECES = 8, PITCH = 128, TABLE_BYTES = 0;
    static constexpr bool AS_STORED = true;
    static constexpr bool SCALES = false;
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ u32 stride(u32 columns, u32) { return 2 * columns; }
    static __device__ __forceinline__ const u8* piece(const Weights& w, u64 row, u32 columns, u32 piece) {
        return w.planes + row * stride(columns, piece) + piece * 16;
    }
    static __device__ __forceinline__ u32 advance(u32 step, u32) { return step * 128; }
    static __device__ __forceinline__ const u8* scales(const Weights&, u64, u32) { return nullptr; }
    static __device__ __forceinline__ u32 scales_advance(u32, bool) { return 0; }
    static __device__ __forceinline__ bool odd(u32, u32) { return false; }
    // Halves of odd rows change places, so that rows that are read together meet no bank twice.
    static __device__ __forceinline__ u32 place(u32 row, u32 piece) { return piece ^ row % 2 * 4; }
    struct Raw {
        uint4 weights[2];
    };
    static __device__ __forceinline__ Raw load(const u8* row, u32, bool, u32 step, u32 t) {
        const u32 g = threadIdx.x % WARP / 4;
        return {{*(const uint4*)(row + place(g, t) * 16), *(const uint4*)(row + place(g, 4 + t) * 16)}};
    }
    static __device__ __forceinline__ void widen(const Raw& raw, int part, Table, u32* w) {
        const uint4 weights = raw.weights[part];
        w[0] = weights.x;
        w[1] = weights.y;
        w[2] = weights.z;
        w[3] = weights.w;
    }
};
