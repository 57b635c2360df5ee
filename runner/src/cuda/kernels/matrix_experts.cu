// Routed experts for few tokens, near the memory's speed: inputs rounded to 8 bits, 32 values sharing a scale.
//
// Weights lie in planes; a lane takes 16 bytes of codes at a time, a chunk. The input lies in shared memory in the order
// in which chunks use it: piece j (16 values) of chunk c at [c / 32][j][c % 32].

static __device__ const u16 d_iq2_xxs[256] = {IQ2_XXS_CODEBOOK};

// All experts' rows of one kind: [experts * rows, columns].
struct Weights {
    const u8* planes;
    u64 rows;
};

// Input of a product in shared memory.
struct Input {
    uint4* codes;
    // Scale of each piece, and that scale times the sum of the piece's codes.
    float* scales;
    float* sums;
};

// Each format: values a chunk, pieces a chunk, which 16 values of the row a piece is, and the dot product of one chunk.
struct Iq2Xxs {
    static constexpr int VALUES = 64, PIECES = 4, TABLE_BYTES = 256 * 8 + 128 * 4;
    static constexpr bool SUMS = false, INTERLEAVED = false;
    struct Raw {
        uint4 codes;
        u16 d;
    };
    static __device__ __forceinline__ u32 chunk(u32 piece) { return piece / 4; }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece % 4; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) { return chunk * 4 + place; }

    static __device__ void fill(u8* table) {
        u32* grid = (u32*)table;
        u32* signs = (u32*)(table + 2048);
        for (u32 i = threadIdx.x; i < 512; i += blockDim.x) {
            u32 codes = d_iq2_xxs[i / 2] >> (i % 2 * 8), bytes = 0;
            for (int k = 0; k < 4; k++) {
                u32 code = codes >> (2 * k) & 3;
                bytes |= (code == 0 ? 8u : code == 1 ? 25u : 43u) << (8 * k);
            }
            grid[i] = bytes;
        }
        // Selectors of a byte permutation that takes each of eight bytes or its negative.
        for (u32 i = threadIdx.x; i < 128; i += blockDim.x) {
            u32 all = i | (__popc(i) & 1) << 7, selectors = 0;
            for (int k = 0; k < 8; k++) selectors |= ((k & 3) | (all >> k & 1) << 2) << (4 * k);
            signs[i] = selectors;
        }
    }
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 4)) + chunk);
        raw.d = load_once((const u16*)(w.planes + w.rows * (columns / 4)) + row * (columns / 256) + chunk / 4);
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales, const float*,
                                                const u8* table, u32) {
        const uint2* grid = (const uint2*)table;
        const u32* signs = (const u32*)(table + 2048);
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 entries = s ? raw.codes.z : raw.codes.x, rest = s ? raw.codes.w : raw.codes.y;
            uint4 x0 = x[2 * s * WARP], x1 = x[(2 * s + 1) * WARP];
            u32 xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
            int dot = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint2 g = grid[entries >> (8 * k) & 255];
                u32 selector = signs[rest >> (7 * k) & 127];
                // No grid byte exceeds 43, so that no borrow crosses: the bytes' negatives.
                u32 low = __byte_perm(g.x, 0x01010100u - g.x, selector);
                u32 high = __byte_perm(g.y, 0x01010100u - g.y, selector >> 16);
                dot = dot4(high, xs[2 * k + 1], dot4(low, xs[2 * k], dot));
            }
            sum = fmaf((float)(dot * (int)((rest >> 28) * 2 + 1)), scales[2 * s * WARP], sum);
        }
        return half_to_float(raw.d) * 0.125f * sum;
    }
};

struct Q2K {
    static constexpr int VALUES = 64, PIECES = 4, TABLE_BYTES = 0;
    static constexpr bool SUMS = true, INTERLEAVED = false;
    struct Raw {
        uint4 codes;
        u32 scales;
        u32 dm;
    };
    // Piece 8h + 2j + s of a block belongs to chunk 2h + s.
    static __device__ __forceinline__ u32 chunk(u32 piece) {
        return piece / 16 * 4 + piece / 8 % 2 * 2 + piece % 2;
    }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece / 2 % 4; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) {
        return chunk / 4 * 16 + chunk / 2 % 2 * 8 + place * 2 + chunk % 2;
    }
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        const u8* scales = w.planes + w.rows * (columns / 4);
        const u8* dm = scales + w.rows * (columns / 16);
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 4)) + chunk);
        raw.scales = load_once((const u32*)(scales + row * (columns / 16)) + chunk);
        raw.dm = load_once((const u32*)dm + row * (columns / 256) + chunk / 4);
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales,
                                                const float* sums, const u8*, u32) {
        float scaled = 0.0f, minima = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 xs = x[j * WARP];
            int dot = dot4(raw.codes.x >> (2 * j) & 0x03030303u, xs.x, 0);
            dot = dot4(raw.codes.y >> (2 * j) & 0x03030303u, xs.y, dot);
            dot = dot4(raw.codes.z >> (2 * j) & 0x03030303u, xs.z, dot);
            dot = dot4(raw.codes.w >> (2 * j) & 0x03030303u, xs.w, dot);
            u32 s = raw.scales >> (8 * j) & 255;
            scaled = fmaf((float)(dot * (int)(s & 15)), scales[j * WARP], scaled);
            minima = fmaf((float)(s >> 4), sums[j * WARP], minima);
        }
        return half_to_float((u16)raw.dm) * scaled - half_to_float((u16)(raw.dm >> 16)) * minima;
    }
};

struct Q4K {
    static constexpr int VALUES = 32, PIECES = 2, TABLE_BYTES = 0;
    static constexpr bool SUMS = true, INTERLEAVED = false;
    struct Raw {
        uint4 codes;
        // d, dmin, then twelve bytes of 6-bit scales and minima.
        uint4 head;
    };
    // Piece 4q + 2 high + half of a block belongs to chunk 2q + half.
    static __device__ __forceinline__ u32 chunk(u32 piece) {
        return piece / 16 * 8 + piece / 4 % 4 * 2 + piece % 2;
    }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece / 2 % 2; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) {
        return chunk / 8 * 16 + chunk / 2 % 4 * 4 + place * 2 + chunk % 2;
    }
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 2)) + chunk);
        raw.head = load_once((const uint4*)(w.planes + w.rows * (columns / 2)) + row * (columns / 256) + chunk / 8);
    }
    // Scales of pairs 2q and 2q + 1 in the low two bytes, minima in the high two.
    static __device__ __forceinline__ u32 pairs(const uint4& head, u32 q) {
        u32 shift = q % 2 * 16;
        u32 low = head.y >> shift & 0xffff, middle = head.z >> shift & 0xffff, high = head.w >> shift & 0xffff;
        if (q < 2) return (low & 0x3f3f) | (middle & 0x3f3f) << 16;
        u32 scales = (high & 0x0f0f) | (low >> 2 & 0x3030), minima = (high >> 4 & 0x0f0f) | (middle >> 2 & 0x3030);
        return scales | minima << 16;
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales,
                                                const float* sums, const u8*, u32 chunk) {
        u32 pair = pairs(raw.head, chunk / 2 % 4);
        float scaled = 0.0f, minima = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 xs = x[j * WARP];
            int dot = dot4(raw.codes.x >> (4 * j) & 0x0f0f0f0fu, xs.x, 0);
            dot = dot4(raw.codes.y >> (4 * j) & 0x0f0f0f0fu, xs.y, dot);
            dot = dot4(raw.codes.z >> (4 * j) & 0x0f0f0f0fu, xs.z, dot);
            dot = dot4(raw.codes.w >> (4 * j) & 0x0f0f0f0fu, xs.w, dot);
            scaled = fmaf((float)(dot * (int)(pair >> (8 * j) & 63)), scales[j * WARP], scaled);
            minima = fmaf((float)(pair >> (16 + 8 * j) & 63), sums[j * WARP], minima);
        }
        return half_to_float((u16)raw.head.x) * scaled - half_to_float((u16)(raw.head.x >> 16)) * minima;
    }
};

struct Mxfp4 {
    static constexpr int VALUES = 32, PIECES = 2, TABLE_BYTES = 0;
    // Values of a block in the order 0, 16, 1, 17, ..: that of the nibbles.
    static constexpr bool SUMS = false, INTERLEAVED = true;
    struct Raw {
        uint4 codes;
        u8 exponent;
    };
    static __device__ __forceinline__ u32 chunk(u32 piece) { return piece / 2; }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece % 2; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) { return chunk * 2 + place; }
    static __device__ void fill(u8*) {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 2)) + chunk);
        raw.exponent = load_once(w.planes + w.rows * (columns / 2) + row * (columns / 32) + chunk);
    }
    // Twice the values of four codes in the low nibbles.
    static __device__ __forceinline__ u32 values(u32 codes) {
        u32 positive = __byte_perm(0x03020100u, 0x0c080604u, codes & 0x7777);
        u32 negative = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, codes & 0x7777);
        return __byte_perm(positive, negative, 0x3210u | (codes >> 1 & 0x4444));
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales, const float*,
                                                const u8*, u32) {
        uint4 x0 = x[0], x1 = x[WARP];
        int dot = dot4(values(raw.codes.x), x0.x, 0);
        dot = dot4(values(raw.codes.x >> 16), x0.y, dot);
        dot = dot4(values(raw.codes.y), x0.z, dot);
        dot = dot4(values(raw.codes.y >> 16), x0.w, dot);
        dot = dot4(values(raw.codes.z), x1.x, dot);
        dot = dot4(values(raw.codes.z >> 16), x1.y, dot);
        dot = dot4(values(raw.codes.w), x1.z, dot);
        dot = dot4(values(raw.codes.w >> 16), x1.w, dot);
        u32 e = raw.exponent;
        float scale = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        return (float)dot * scales[0] * scale;
    }
};

// Puts four codes, values `value` .. `value` + 3 of the row, where chunks will read them.
template <class F> static __device__ __forceinline__ void put(uint4* codes, u32 value, u32 word) {
    u32 piece = value / 16, chunk = F::chunk(piece);
    u8* row = (u8*)(codes + (u64)(chunk / WARP * F::PIECES) * WARP + chunk % WARP);
    if (F::INTERLEAVED) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 within = (value + i) % 16 * 2 + piece % 2;
            row[within / 16 * WARP * 16 + within % 16] = (u8)(word >> (8 * i));
        }
    } else {
        *(u32*)(row + F::place(piece) * WARP * 16 + value % 16) = word;
    }
}

// Once codes and the scales of 32 values lie in shared memory: scale and sum of every piece.
template <class F> static __device__ __forceinline__ void finish_input(const Input& x, const float* scales32, u32 columns) {
    for (u32 i = threadIdx.x; i < columns / 16; i += blockDim.x) {
        u32 chunk = i / F::PIECES, place = i % F::PIECES;
        u32 at = (chunk / WARP * F::PIECES + place) * WARP + chunk % WARP;
        float scale = scales32[F::piece(chunk, place) / 2];
        x.scales[at] = scale;
        if (F::SUMS) {
            uint4 v = x.codes[at];
            int sum = dot4(v.x, 0x01010101u, dot4(v.y, 0x01010101u, dot4(v.z, 0x01010101u, dot4(v.w, 0x01010101u, 0))));
            x.sums[at] = scale * (float)sum;
        }
    }
}

// Where the parts of an input of `columns` values lie, and behind which byte they end. Chunks come in full warps.
template <class F> static __device__ __forceinline__ Input input_at(u8*& memory, u32 columns) {
    u32 pieces = (columns / F::VALUES + WARP - 1) / WARP * WARP * F::PIECES;
    Input x;
    x.codes = (uint4*)memory;
    x.scales = (float*)(memory + pieces * 16);
    x.sums = x.scales + pieces;
    memory += pieces * (F::SUMS ? 24 : 20);
    return x;
}

// Rounds 32 values that a warp's lanes have, one each: the code, and the scale on every lane.
static __device__ __forceinline__ int round_to_8_bits(float value, float* scale) {
    float most = fabsf(value);
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, distance));
    *scale = most / 127.0f;
    float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
    return __float2int_rn(value * inverse);
}

// Gate and up products of 32 rows for one expert of one token, activated:
// codes[item, F] and scales[item, F / 32] of weight * mid, and plain[item, F] = mid if wanted.
// Grid: (F / 32, tokens * n_used), 8 warps; a warp has four rows of both matrices, and takes C chunks a lane at a time.
template <class F, int C>
static __device__ __forceinline__ void gate_up(Weights gate, Weights up, const u32* experts, const float* weights,
                                               const float* input, u32 n_used, u32 columns, u32 rows, float limit,
                                               i8* codes, float* scales, float* plain) {
    extern __shared__ uint4 shared_memory[];
    __shared__ float mids[32];
    u8* memory = (u8*)shared_memory;
    Input x = input_at<F>(memory, columns);
    float* scales32 = (float*)memory;
    u8* table = memory + columns / 32 * 4;

    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, item = blockIdx.y;
    const u32 chunks = columns / F::VALUES, steps = (chunks + C * WARP - 1) / (C * WARP);
    const u64 row = (u64)experts[item] * rows + blockIdx.x * 32 + warp * 4;
    typename F::Raw now[2][C], next[2][C];
    auto load = [&](typename F::Raw(&raw)[2][C], u32 r, u32 step) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            // Lanes without a chunk load one that exists and drop the result.
            u32 chunk = min((step * C + c) * WARP + lane, chunks - 1);
            F::load(raw[0][c], gate, row + r, columns, chunk);
            F::load(raw[1][c], up, row + r, columns, chunk);
        }
    };
    load(now, 0, 0);

    F::fill(table);
    const float* from = input + (u64)(item / n_used) * columns;
    for (u32 group = warp; group < columns / 32; group += 8) {
        float scale;
        int code = round_to_8_bits(from[group * 32 + lane], &scale) & 255;
        code |= __shfl_down_sync(ALL_LANES, code, 1) << 8;
        code |= __shfl_down_sync(ALL_LANES, code, 2) << 16;
        if (lane % 4 == 0) put<F>(x.codes, group * 32 + lane, code);
        if (lane == 0) scales32[group] = scale;
    }
    __syncthreads();
    finish_input<F>(x, scales32, columns);
    __syncthreads();

    u32 r = 0, step = 0;
    float sums[2] = {0.0f, 0.0f};
    while (r < 4) {
        bool last = step + 1 == steps;
        if (!last) {
            load(next, r, step + 1);
        } else if (r < 3) {
            load(next, r + 1, 0);
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            u32 chunk = (step * C + c) * WARP + lane, at = (step * C + c) * F::PIECES * WARP + lane;
            bool inside = chunk < chunks;
            if (!inside) at = lane;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                float dot = F::dot(now[m][c], x.codes + at, x.scales + at, x.sums + at, table, chunk);
                sums[m] += inside ? dot : 0.0f;
            }
        }
        step++;
        if (last) {
            float g = warp_sum(sums[0]), u = warp_sum(sums[1]);
            if (lane == 0) mids[warp * 4 + r] = swiglu(g, u, limit);
            sums[0] = sums[1] = 0.0f;
            step = 0;
            r++;
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            now[0][c] = next[0][c];
            now[1][c] = next[1][c];
        }
    }
    __syncthreads();
    if (warp == 0) {
        float mid = mids[lane], scale;
        u64 at = (u64)item * rows + blockIdx.x * 32 + lane;
        if (plain) plain[at] = mid;
        codes[at] = (i8)round_to_8_bits(mid * weights[item], &scale);
        if (lane == 0) scales[at / 32] = scale;
    }
}

// out[token, row] = sum over slots, in their order, of down(expert of the slot)[row, .] . mid[token, slot, .].
// Grid: (row blocks, tokens), 16 warps; a warp has one row at a time, and loads N chunks a lane before it uses them.
template <class F, int N>
static __device__ __forceinline__ void down(Weights matrix, const u32* experts, const i8* codes, const float* scales,
                                            u32 n_used, u32 columns, u32 rows, float* out) {
    extern __shared__ uint4 shared_memory[];
    u8* memory = (u8*)shared_memory;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.y;
    const u32 chunks = columns / F::VALUES, steps = (chunks + WARP - 1) / WARP, n = n_used * steps;
    const u32* chosen = experts + (u64)token * n_used;
    const Input first = input_at<F>(memory, columns);
    const u32 bytes = memory - (u8*)shared_memory;
    auto input = [&](u32 slot) {
        u64 skip = (u64)slot * bytes;
        Input x = {(uint4*)((u8*)first.codes + skip), (float*)((u8*)first.scales + skip),
                   (float*)((u8*)first.sums + skip)};
        return x;
    };
    u8* table = (u8*)shared_memory + n_used * bytes;
    F::fill(table);
    for (u32 slot = 0; slot < n_used; slot++) {
        const u32* from = (const u32*)(codes + ((u64)token * n_used + slot) * columns);
        uint4* to = input(slot).codes;
        for (u32 i = threadIdx.x; i < columns / 4; i += blockDim.x) put<F>(to, i * 4, from[i]);
    }
    __syncthreads();
    for (u32 slot = 0; slot < n_used; slot++) {
        finish_input<F>(input(slot), scales + ((u64)token * n_used + slot) * (columns / 32), columns);
    }
    __syncthreads();

    for (u32 row = warp * gridDim.x + blockIdx.x; row < rows; row += gridDim.x * 16) {
        float sum = 0.0f;
        for (u32 start = 0; start < n; start += N) {
            typename F::Raw raw[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                u32 index = min(start + i, n - 1), chunk = index % steps * WARP + lane;
                F::load(raw[i], matrix, (u64)chosen[index / steps] * rows + row, columns, min(chunk, chunks - 1));
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (start + i < n) {
                    u32 step = (start + i) % steps, chunk = step * WARP + lane;
                    Input x = input((start + i) / steps);
                    u32 at = chunk < chunks ? step * F::PIECES * WARP + lane : lane;
                    float dot = F::dot(raw[i], x.codes + at, x.scales + at, x.sums + at, table, chunk);
                    sum += chunk < chunks ? dot : 0.0f;
                }
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) out[(u64)token * rows + row] = sum;
    }
}

#define EXPERTS(NAME, F, C, N)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 3) gate_up_##NAME(                                             \
        Weights gate, Weights up, const u32* experts, const float* weights, const float* input, u32 n_used,          \
        u32 columns, u32 rows, float limit, i8* codes, float* scales, float* plain) {                                \
        gate_up<F, C>(gate, up, experts, weights, input, n_used, columns, rows, limit, codes, scales, plain);        \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 2) down_##NAME(                                                \
        Weights matrix, const u32* experts, const i8* codes, const float* scales, u32 n_used, u32 columns, u32 rows, \
        float* out) {                                                                                                \
        down<F, N>(matrix, experts, codes, scales, n_used, columns, rows, out);                                      \
    }

EXPERTS(IQ2_XXS, Iq2Xxs, 2, 3)
EXPERTS(Q2_K, Q2K, 1, 3)
EXPERTS(Q4_K, Q4K, 1, 2)
EXPERTS(MXFP4, Mxfp4, 2, 4)
