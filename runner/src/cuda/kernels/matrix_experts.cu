// Routed experts for few tokens, near the memory's speed: inputs rounded to 8 bits, 32 values sharing a scale.
//
// Weights lie in planes; a lane takes 16 bytes of codes at a time, a chunk. The input lies in shared memory in the order
// in which chunks use it: piece j (16 values) of chunk c at [c / 32][j][c % 32].

static __device__ const u16 d_iq2_xxs[256] = {IQ2_XXS_CODEBOOK};

// All experts' rows of one kind, [experts * rows, columns]: codes, then what else a format has.
struct Weights {
    const u8* planes[3];
};

// Entry of an array of which each row has `each`.
template <class T> static __device__ __forceinline__ const T* entry(const u8* plane, u32 row, u32 each, u32 index) {
    return (const T*)plane + (u64)row * each + index;
}

// Input of a product in shared memory.
struct Input {
    uint4* codes;
    // Scale of each piece, divided by what its place shifts the weights' codes by, and scale times the sum of the piece's codes.
    float* scales;
    float* sums;
};

struct NoTable {};

// Shared memory that a launch asks for: two words for each lane, sums of 32 rows of gate and of up, then inputs.
extern __shared__ uint4 shared_memory[];
#define SUMS_AT (2 * WARP * 4)
#define INPUTS_AT (4 * WARP * 4)

// Each format: values a chunk, pieces a chunk, by how many bits more codes are shifted at each further place, which 16 values of
// the row a piece is, and the dot product of one chunk.

// Of IQ2_XXS: selectors of a byte permutation, a nibble a value, of 256 codes which magnitude, then of 128 signs from which
// side. COPIES of each entry lie side by side, and lanes read copies of their own, so that at most two meet in a bank, or none.
template <int COPIES> static __device__ __forceinline__ u32* selector_table() {
    __shared__ u32 words[(256 + 128) * COPIES];
    return words;
}

template <int COPIES> struct Iq2Xxs {
    static constexpr u32 POSITIVE = 0x002b1908u, NEGATIVE = 0x00d5e7f8u;
    static constexpr int VALUES = 64, PIECES = 4, CODE_SHIFT = 0, SHIFT = COPIES == WARP ? 7 : 6;
    static constexpr bool SUMS = false, INTERLEAVED = false;
    struct Table {
        // Where in an entry the lane's copy is, and a constant: both read, since the compiler would make them anew for every use.
        u32 own;
        u32 positive;
        __device__ __forceinline__ Table() {
            own = ((volatile const u32*)shared_memory)[WARP + threadIdx.x % WARP];
            positive = ((volatile const u32*)shared_memory)[threadIdx.x % WARP];
        }
        // By byte `k` of `entries` and seven bits of `rest`.
        __device__ __forceinline__ u32 selectors(u32 entries, u32 rest, u32 k) const {
            const u8* table = (const u8*)selector_table<COPIES>();
            u32 magnitudes = *(const u32*)(table + (permute(entries, 0, 0x4440 | k) * (4 * COPIES) + own));
            u32 signs = *(const u32*)(table + (256 << SHIFT) + (__funnelshift_l(rest, rest, SHIFT - 7 * k) & 127 << SHIFT | own));
            return magnitudes + signs;
        }
    };
    struct Raw {
        uint4 codes;
        u16 d;
    };
    static __device__ __forceinline__ u32 chunk(u32 piece) { return piece / 4; }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece % 4; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) { return chunk * 4 + place; }

    static __device__ __forceinline__ u32 selectors(u32 entry) {
        u32 selectors = 0, codes = entry < 256 ? d_iq2_xxs[entry] : 0, signs = (entry - 256) | (__popc(entry - 256) & 1) << 7;
#pragma unroll
        for (int k = 0; k < 8; k++) selectors |= entry < 256 ? (codes >> (2 * k) & 3) << (4 * k) : (signs >> k & 1) << (4 * k + 2);
        return selectors;
    }
    static __device__ __forceinline__ void fill() {
        // A lane works out one entry; then the warp writes all copies of one, or of two, at a time, so that no bank is met twice.
        const u32 lane = threadIdx.x % WARP;
        for (u32 first = threadIdx.x - lane; first < 256 + 128; first += blockDim.x) {
            const u32 mine = selectors(first + lane);
            u32* words = selector_table<COPIES>() + first * COPIES + lane;
#pragma unroll
            for (u32 i = 0; i < COPIES; i++) words[i * WARP] = __shfl_sync(ALL_LANES, mine, (i * WARP + lane) / COPIES);
        }
        if (threadIdx.x < WARP) {
            ((u32*)shared_memory)[lane] = POSITIVE;
            ((u32*)shared_memory)[WARP + lane] = lane % COPIES * 4;
        }
    }
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u32 row, u32 columns, u32 chunk) {
        raw.codes = load_once(entry<uint4>(w.planes[0], row, columns / 64, chunk));
        raw.d = load_once(entry<u16>(w.planes[1], row, columns / 256, chunk / 4));
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales, const float*,
                                                const Table& table, u32) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            u32 entries = s ? raw.codes.z : raw.codes.x, rest = s ? raw.codes.w : raw.codes.y;
            uint4 x0 = x[2 * s * WARP], x1 = x[(2 * s + 1) * WARP];
            u32 xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
            int dot = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 selectors = table.selectors(entries, rest, k);
                u32 low = permute(table.positive, NEGATIVE, selectors), high = permute(table.positive, NEGATIVE, selectors >> 16);
                dot = dot4(high, xs[2 * k + 1], dot4(low, xs[2 * k], dot));
            }
            sum = fmaf((float)(dot * (int)((rest >> 28) * 2 + 1)), scales[2 * s * WARP], sum);
        }
        return half_to_float(raw.d) * 0.125f * sum;
    }
};

struct Q2K {
    typedef NoTable Table;
    static constexpr int VALUES = 64, PIECES = 4, CODE_SHIFT = 2;
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
    static __device__ void fill() {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u32 row, u32 columns, u32 chunk) {
        raw.codes = load_once(entry<uint4>(w.planes[0], row, columns / 64, chunk));
        raw.scales = load_once(entry<u32>(w.planes[1], row, columns / 64, chunk));
        raw.dm = load_once(entry<u32>(w.planes[2], row, columns / 256, chunk / 4));
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales,
                                                const float* sums, NoTable, u32) {
        float scaled = 0.0f, minima = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 xs = x[j * WARP];
            // 4^j times the codes, exactly undone by the input's scale.
            const u32 mask = 0x03030303u << (2 * j);
            int dot = dot4_unsigned(raw.codes.x & mask, xs.x, 0);
            dot = dot4_unsigned(raw.codes.y & mask, xs.y, dot);
            dot = dot4_unsigned(raw.codes.z & mask, xs.z, dot);
            dot = dot4_unsigned(raw.codes.w & mask, xs.w, dot);
            u32 s = raw.scales >> (8 * j) & 255;
            scaled = fmaf((float)(dot * (int)(s & 15)), scales[j * WARP], scaled);
            minima = fmaf((float)(s >> 4), sums[j * WARP], minima);
        }
        return half_to_float((u16)raw.dm) * scaled - half_to_float((u16)(raw.dm >> 16)) * minima;
    }
};

struct Q4K {
    typedef NoTable Table;
    static constexpr int VALUES = 32, PIECES = 2, CODE_SHIFT = 4;
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
    static __device__ void fill() {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u32 row, u32 columns, u32 chunk) {
        raw.codes = load_once(entry<uint4>(w.planes[0], row, columns / 32, chunk));
        raw.head = load_once(entry<uint4>(w.planes[1], row, columns / 256, chunk / 8));
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
                                                const float* sums, NoTable, u32 chunk) {
        u32 pair = pairs(raw.head, chunk / 2 % 4);
        float scaled = 0.0f, minima = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 xs = x[j * WARP];
            // 16^j times the codes, exactly undone by the input's scale.
            const u32 mask = 0x0f0f0f0fu << (4 * j);
            int dot = dot4_unsigned(raw.codes.x & mask, xs.x, 0);
            dot = dot4_unsigned(raw.codes.y & mask, xs.y, dot);
            dot = dot4_unsigned(raw.codes.z & mask, xs.z, dot);
            dot = dot4_unsigned(raw.codes.w & mask, xs.w, dot);
            scaled = fmaf((float)(dot * (int)(pair >> (8 * j) & 63)), scales[j * WARP], scaled);
            minima = fmaf((float)(pair >> (16 + 8 * j) & 63), sums[j * WARP], minima);
        }
        return half_to_float((u16)raw.head.x) * scaled - half_to_float((u16)(raw.head.x >> 16)) * minima;
    }
};

struct Mxfp4 {
    typedef NoTable Table;
    static constexpr int VALUES = 32, PIECES = 2, CODE_SHIFT = 0;
    // Values of a block in the order 0, 16, 1, 17, ..: that of the nibbles.
    static constexpr bool SUMS = false, INTERLEAVED = true;
    struct Raw {
        uint4 codes;
        u8 exponent;
    };
    static __device__ __forceinline__ u32 chunk(u32 piece) { return piece / 2; }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece % 2; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) { return chunk * 2 + place; }
    static __device__ void fill() {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u32 row, u32 columns, u32 chunk) {
        raw.codes = load_once(entry<uint4>(w.planes[0], row, columns / 32, chunk));
        raw.exponent = load_once(entry<u8>(w.planes[1], row, columns / 32, chunk));
    }
    // Twice the values of four codes in the low nibbles.
    static __device__ __forceinline__ u32 values(u32 codes) {
        u32 positive = permute(0x03020100u, 0x0c080604u, codes & 0x7777);
        u32 negative = permute(0xfdfeff00u, 0xf4f8fafcu, codes & 0x7777);
        return permute(positive, negative, 0x3210u | (codes >> 1 & 0x4444));
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales, const float*,
                                                NoTable, u32) {
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

// Place of a piece of the row among all.
template <class F> static __device__ __forceinline__ u32 place_of(u32 piece) {
    u32 chunk = F::chunk(piece);
    return (chunk / WARP * F::PIECES + F::place(piece)) * WARP + chunk % WARP;
}

// Puts four codes, values `value` .. `value` + 3 of the row, where chunks will read them.
template <class F> static __device__ __forceinline__ void put(uint4* codes, u32 value, u32 word) {
    u32 piece = value / 16;
    if (F::INTERLEAVED) {
        u8* first = (u8*)(codes + place_of<F>(piece - piece % 2));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 within = (value + i) % 16 * 2 + piece % 2;
            first[within / 16 * WARP * 16 + within % 16] = (u8)(word >> (8 * i));
        }
    } else {
        *(u32*)((u8*)(codes + place_of<F>(piece)) + value % 16) = word;
    }
}

// Pieces that an input of `columns` values has room for: chunks come in full groups.
template <class F> static __device__ __forceinline__ u32 room_for(u32 columns, u32 group) {
    return (columns / F::VALUES + group - 1) / group * group * F::PIECES;
}

// Where the parts of an input lie, and behind which byte they end.
template <class F> static __device__ __forceinline__ Input input_at(u8*& memory, u32 pieces) {
    Input x;
    x.codes = (uint4*)memory;
    x.scales = (float*)(memory + pieces * 16);
    x.sums = x.scales + pieces;
    memory += pieces * (F::SUMS ? 24 : 20);
    return x;
}

template <class F> static __device__ __forceinline__ void put_scale(const Input& x, u32 piece, float scale, int sum) {
    const u32 at = place_of<F>(piece);
    x.scales[at] = scale * (1.0f / (1 << F::CODE_SHIFT * F::place(piece)));
    if (F::SUMS) x.sums[at] = scale * (float)sum;
}

// Chunks that fill up a group multiply by nothing.
template <class F> static __device__ __forceinline__ void clear(u8* inputs, u32 bytes, u32 columns, u32 pieces) {
    if (pieces == columns / 16) return;
    for (u32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((u32*)inputs)[i] = 0;
    __syncthreads();
}

// scale = most / 127, and 1 / scale: an approximation and one correction with the exact remainder round as divisions
// do. Where all values are below 1e-35, they become zeros; what is not finite makes a scale that is not.
static __device__ __forceinline__ float scale_and_inverse(float most, float* scale) {
    const float part = 1.0f / 127.0f;
    float quotient = most * part, inverse;
    quotient = fmaf(fmaf(-quotient, 127.0f, most), part, quotient);
    *scale = quotient;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(quotient));
    inverse = fmaf(fmaf(-quotient, inverse, 1.0f), inverse, inverse);
    return quotient > 1e-37f ? inverse : 0.0f;
}

// Rounds 32 values that a warp's lanes have, one each: the code, and the scale on every lane.
static __device__ __forceinline__ int round_to_8_bits(float value, float* scale) {
    u32 most = magnitude(value);
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) most = max(most, __shfl_xor_sync(ALL_LANES, most, distance));
    float inverse = scale_and_inverse(__uint_as_float(most), scale);
    return __float2int_rn(value * inverse);
}

// Four values of 32 that eight lanes have: their codes, and the scale on every lane. The same as above.
static __device__ __forceinline__ u32 round_four_to_8_bits(float4 v, float* scale) {
    u32 most = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
#pragma unroll
    for (int distance = 4; distance; distance >>= 1) most = max(most, __shfl_xor_sync(ALL_LANES, most, distance));
    float inverse = scale_and_inverse(__uint_as_float(most), scale);
    // Behind this sum the lowest byte is the nearest integer.
    const float shift = 12582912.0f;
    u32 x = __float_as_uint(__fadd_rn(__fmul_rn(v.x, inverse), shift)), y = __float_as_uint(__fadd_rn(__fmul_rn(v.y, inverse), shift));
    u32 z = __float_as_uint(__fadd_rn(__fmul_rn(v.z, inverse), shift)), w = __float_as_uint(__fadd_rn(__fmul_rn(v.w, inverse), shift));
    return permute(permute(x, y, 0x0040), permute(z, w, 0x0040), 0x5410);
}

// Rounds a row of inputs into shared memory.
template <class F>
static __device__ __forceinline__ void put_input(const Input& x, const float* values, u32 columns) {
    // Loads of a few rounds at once, for they take long.
    constexpr u32 ROUNDS = 4;
    for (u32 base = threadIdx.x; base < columns / 4; base += ROUNDS * blockDim.x) {
        float4 loaded[ROUNDS];
#pragma unroll
        for (u32 i = 0; i < ROUNDS; i++) loaded[i] = ((const float4*)values)[min(base + i * blockDim.x, columns / 4 - 1)];
#pragma unroll
        for (u32 i = 0; i < ROUNDS; i++) {
            const u32 quad = base + i * blockDim.x;
            float scale;
            u32 word = round_four_to_8_bits(loaded[i], &scale);
            int sum = dot4(word, 0x01010101u, 0);
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            // The same on all lanes of a warp, for columns are a multiple of 256.
            if (quad >= columns / 4) break;
            put<F>(x.codes, quad * 4, word);
            if (quad % 4 == 0) put_scale<F>(x, quad / 4, scale, sum);
        }
    }
}

// Gate and up products of 32 rows for one expert of one token, activated:
// codes[item, F] and scales[item, F / 32] of weight * mid, and plain[item, F] = mid if wanted.
// Grid: (F / 32, n_used, tokens), 8 warps; a warp has four rows of both matrices, and takes C chunks a lane at a time.
template <class F, int C>
static __device__ __forceinline__ void gate_up(const Weights& gate, const Weights& up, const u32* experts, const float* weights,
                                               const float* input, u32 n_used, u32 columns, u32 rows, float limit,
                                               i8* codes, float* scales, float* plain) {
    float* row_sums = (float*)((u8*)shared_memory + SUMS_AT);
    u8* const inputs = (u8*)shared_memory + INPUTS_AT;
    u8* memory = inputs;
    const u32 pieces = room_for<F>(columns, C * WARP);
    const Input x = input_at<F>(memory, pieces);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.z, item = token * n_used + blockIdx.y;
    const u32 chunks = columns / F::VALUES, steps = (chunks + C * WARP - 1) / (C * WARP);
    F::fill();
    await_previous();
    const u32 row = experts[item] * rows + blockIdx.x * 32 + warp * 4;
    typename F::Raw now[2][C], next[2][C];
    auto load = [&](typename F::Raw(&raw)[2][C], u32 r, u32 step) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            // Lanes without a chunk load one that exists.
            u32 chunk = min((step * C + c) * WARP + lane, chunks - 1);
            F::load(raw[0][c], gate, row + r, columns, chunk);
            F::load(raw[1][c], up, row + r, columns, chunk);
        }
    };
    load(now, 0, 0);
    clear<F>(inputs, memory - inputs, columns, pieces);
    put_input<F>(x, input + (u64)token * columns, columns);
    __syncthreads();
    const typename F::Table table;

    float sums[2] = {0.0f, 0.0f};
    u32 r = 0, step = 0;
    // Multiplies what is loaded, loads what follows.
    auto go_on = [&](const typename F::Raw(&loaded)[2][C], typename F::Raw(&ahead)[2][C]) {
        const u32 this_row = r, this_step = step;
        if (++step == steps) step = 0, r++;
        if (r < 4) load(ahead, r, step);
#pragma unroll
        for (int c = 0; c < C; c++) {
            const u32 first = (this_step * C + c) * WARP, at = first * F::PIECES + lane;
#pragma unroll
            for (int m = 0; m < 2; m++)
                sums[m] += F::dot(loaded[m][c], x.codes + at, x.scales + at, x.sums + at, table, first + lane);
        }
        if (step != 0) return;
        // Lane 0 gets the sum of gate, lane 16 that of up.
        sums_of_warp(sums);
        if (lane % 16 == 0) row_sums[lane * 2 + warp * 4 + this_row] = sums[0];
        sums[0] = sums[1] = 0.0f;
    };
    // Four rows: an even number of steps.
    while (r < 4) {
        go_on(now, next);
        go_on(next, now);
    }
    __syncthreads();
    if (warp == 0) {
        float mid = swiglu(row_sums[lane], row_sums[WARP + lane], limit), scale;
        u64 at = (u64)item * rows + blockIdx.x * 32 + lane;
        if (plain) plain[at] = mid;
        codes[at] = (i8)round_to_8_bits(mid * weights[item], &scale);
        if (lane == 0) scales[at / 32] = scale;
    }
}

// Chunks of a row that a warp takes together: those of one slot's expert, a lane a chunk.
struct Stretch {
    // The expert's first row among all, the first chunk, and where the input's codes and scales for it are.
    u32 first_row;
    u32 first_chunk;
    u32 codes;
    u32 scales;
};

// out[token, row] = sum over slots, in their order, of down(expert of the slot)[row, .] . mid[token, slot, .].
// Grid: (row blocks, tokens), 16 warps; a warp has one row at a time, and loads N chunks a lane while it uses as many.
template <class F, int N>
static __device__ __forceinline__ void down(const Weights& matrix, const u32* experts, const i8* codes,
                                            const float* scales, u32 n_used, u32 columns, u32 rows, float* out) {
    u8* const inputs = (u8*)shared_memory + INPUTS_AT;
    u8* memory = inputs;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.y;
    const u32 chunks = columns / F::VALUES, steps = (chunks + WARP - 1) / WARP, row_step = gridDim.x * 16;
    const u32 room = room_for<F>(columns, WARP);
    const Input first = input_at<F>(memory, room);
    // All inputs have the same size; behind them lie the stretches of a row, all slots one after the other.
    const u32 bytes = memory - inputs, stretches = n_used * steps;
    Stretch* const plan = (Stretch*)(inputs + n_used * bytes);
    F::fill();
    await_previous();
    for (u32 i = threadIdx.x; i < stretches; i += blockDim.x) {
        u32 slot = i / steps, step = i % steps;
        plan[i].first_row = experts[(u64)token * n_used + slot] * rows;
        plan[i].first_chunk = step * WARP;
        plan[i].codes = slot * bytes + step * F::PIECES * WARP * 16;
        plan[i].scales = slot * bytes + step * F::PIECES * WARP * 4;
    }
    __syncthreads();
    u32 ahead_row = warp * gridDim.x + blockIdx.x, ahead = 0, row = ahead_row, here = 0;
    typename F::Raw now[N], next[N];
    auto load = [&](typename F::Raw(&raw)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            // Behind the last row the last one is loaded again.
            const Stretch s = plan[ahead];
            F::load(raw[i], matrix, s.first_row + min(ahead_row, rows - 1), columns, min(s.first_chunk + lane, chunks - 1));
            if (++ahead == stretches) ahead = 0, ahead_row += row_step;
        }
    };
    load(now);

    clear<F>(inputs, n_used * bytes, columns, room);
    const u32 pieces = columns / 16;
    for (u32 i = threadIdx.x; i < n_used * pieces; i += blockDim.x) {
        uint4 v = ((const uint4*)(codes + (u64)token * n_used * columns))[i];
        float scale = scales[(u64)token * n_used * (columns / 32) + i / 2];
        const u32 piece = i % pieces, skip = i / pieces * bytes;
        const Input x = {(uint4*)((u8*)first.codes + skip), (float*)((u8*)first.scales + skip),
                         (float*)((u8*)first.sums + skip)};
        if (F::INTERLEAVED) {
            put<F>(x.codes, piece * 16, v.x);
            put<F>(x.codes, piece * 16 + 4, v.y);
            put<F>(x.codes, piece * 16 + 8, v.z);
            put<F>(x.codes, piece * 16 + 12, v.w);
        } else {
            x.codes[place_of<F>(piece)] = v;
        }
        int sum = dot4(v.x, 0x01010101u, dot4(v.y, 0x01010101u, dot4(v.z, 0x01010101u, dot4(v.w, 0x01010101u, 0))));
        put_scale<F>(x, piece, scale, sum);
    }
    __syncthreads();
    const typename F::Table table;

    float sum = 0.0f;
    auto go_on = [&](const typename F::Raw(&loaded)[N], typename F::Raw(&others)[N]) {
        load(others);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (row >= rows) return;
            const Stretch s = plan[here];
            const uint4* x = (const uint4*)((u8*)first.codes + s.codes) + lane;
            const float* x_scales = (const float*)((u8*)first.scales + s.scales) + lane;
            const float* x_sums = (const float*)((u8*)first.sums + s.scales) + lane;
            sum += F::dot(loaded[i], x, x_scales, x_sums, table, s.first_chunk + lane);
            if (++here == stretches) {
                sum = warp_sum(sum);
                if (lane == 0) out[(u64)token * rows + row] = sum;
                sum = 0.0f, here = 0, row += row_step;
            }
        }
    };
    while (row < rows) {
        go_on(now, next);
        go_on(next, now);
    }
}

#define EXPERTS(NAME, F, C, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 3) gate_up_##NAME(                                                \
        const __grid_constant__ Weights gate, const __grid_constant__ Weights up, const u32* experts,                   \
        const float* weights, const float* input, u32 n_used, u32 columns, u32 rows, float limit, i8* codes,            \
        float* scales, float* plain) {                                                                                  \
        gate_up<F, C>(gate, up, experts, weights, input, n_used, columns, rows, limit, codes, scales, plain);           \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(512, 2) down_##NAME(                                                   \
        const __grid_constant__ Weights matrix, const u32* experts, const i8* codes, const float* scales, u32 n_used,   \
        u32 columns, u32 rows, float* out) {                                                                            \
        down<F, N>(matrix, experts, codes, scales, n_used, columns, rows, out);                                         \
    }

// As many copies of a table's entries as lanes where a multiprocessor has room for them, else half as many.
EXPERTS(IQ2_XXS_32, Iq2Xxs<32>, 2, 3)
EXPERTS(IQ2_XXS_16, Iq2Xxs<16>, 2, 3)
EXPERTS(Q2_K, Q2K, 1, 3)
EXPERTS(Q4_K, Q4K, 1, 2)
EXPERTS(MXFP4, Mxfp4, 2, 3)
