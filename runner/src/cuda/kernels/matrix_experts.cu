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

struct NoTable {
    __device__ __forceinline__ NoTable(const u8*, u32) {}
};

// Each format: values a chunk, pieces a chunk, which 16 values of the row a piece is, and the dot product of one chunk.
struct Iq2Xxs {
    // Both tables hold selectors of a byte permutation, a nibble a value: which magnitude, and from which side. `copies` of
    // each entry lie side by side, and lanes read copies of their own, so that at most two meet in a bank, or none. Behind them
    // each lane finds a constant: the compiler would make one anew for every permutation.
    static constexpr u32 POSITIVE = 0x002b1908u, NEGATIVE = 0x00d5e7f8u;
    static constexpr int VALUES = 64, PIECES = 4;
    static constexpr bool SUMS = false, INTERLEAVED = false;
    struct Table {
        u32 stride;
        // Shared memory: the lane's copies of the first entries.
        u32 grid;
        u32 signs;
        u32 positive;
        __device__ __forceinline__ Table(const u8* table, u32 copies) {
            stride = 4 * copies;
            grid = shared_address(table) + (threadIdx.x & (copies - 1)) * 4;
            signs = grid + 256 * stride;
            positive = ((volatile const u32*)(table + (256 + 128) * stride))[threadIdx.x % WARP];
        }
        __device__ __forceinline__ u32 entry(u32 first, u32 number) const {
            u32 selectors;
            asm("ld.shared.u32 %0, [%1];" : "=r"(selectors) : "r"(number * stride + first));
            return selectors;
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
    static __device__ __forceinline__ void fill(u8* table, u32 copies) {
        u32* words = (u32*)table;
        // A lane works out one entry; then the warp writes all copies of one, or of two, at a time, so that no bank is met twice.
        const u32 lane = threadIdx.x % WARP, at_once = copies == WARP ? 1 : 2, own = copies == WARP ? 0 : lane / 16;
        for (u32 first = threadIdx.x - lane; first < 256 + 128; first += blockDim.x) {
            const u32 mine = selectors(first + lane);
#pragma unroll 8
            for (u32 i = 0; i < copies; i++) {
                u32 word = __shfl_sync(ALL_LANES, mine, i * at_once + own);
                words[first * copies + i * WARP + lane] = word;
            }
        }
        if (threadIdx.x < WARP) words[(256 + 128) * copies + threadIdx.x] = POSITIVE;
    }
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 4)) + chunk);
        raw.d = load_once((const u16*)(w.planes + w.rows * (columns / 4)) + row * (columns / 256) + chunk / 4);
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
                u32 entry = permute(entries, 0, 0x4440 | k), signs = rest >> (7 * k) & 127;
                u32 selectors = table.entry(table.grid, entry) | table.entry(table.signs, signs);
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
    static constexpr int VALUES = 64, PIECES = 4;
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
    static __device__ void fill(u8*, u32) {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        const u8* scales = w.planes + w.rows * (columns / 4);
        const u8* dm = scales + w.rows * (columns / 16);
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 4)) + chunk);
        raw.scales = load_once((const u32*)(scales + row * (columns / 16)) + chunk);
        raw.dm = load_once((const u32*)dm + row * (columns / 256) + chunk / 4);
    }
    static __device__ __forceinline__ float dot(const Raw& raw, const uint4* x, const float* scales,
                                                const float* sums, NoTable, u32) {
        float scaled = 0.0f, minima = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 xs = x[j * WARP];
            // 4^j times the codes, exactly undone with the scale.
            const u32 mask = 0x03030303u << (2 * j);
            int dot = dot4_unsigned(raw.codes.x & mask, xs.x, 0);
            dot = dot4_unsigned(raw.codes.y & mask, xs.y, dot);
            dot = dot4_unsigned(raw.codes.z & mask, xs.z, dot);
            dot = dot4_unsigned(raw.codes.w & mask, xs.w, dot);
            u32 s = raw.scales >> (8 * j) & 255;
            scaled = fmaf((float)(dot * (int)(s & 15)), scales[j * WARP] * (1.0f / (1 << (2 * j))), scaled);
            minima = fmaf((float)(s >> 4), sums[j * WARP], minima);
        }
        return half_to_float((u16)raw.dm) * scaled - half_to_float((u16)(raw.dm >> 16)) * minima;
    }
};

struct Q4K {
    typedef NoTable Table;
    static constexpr int VALUES = 32, PIECES = 2;
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
    static __device__ void fill(u8*, u32) {}
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
                                                const float* sums, NoTable, u32 chunk) {
        u32 pair = pairs(raw.head, chunk / 2 % 4);
        float scaled = 0.0f, minima = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint4 xs = x[j * WARP];
            // 16^j times the codes, exactly undone with the scale.
            const u32 mask = 0x0f0f0f0fu << (4 * j);
            int dot = dot4_unsigned(raw.codes.x & mask, xs.x, 0);
            dot = dot4_unsigned(raw.codes.y & mask, xs.y, dot);
            dot = dot4_unsigned(raw.codes.z & mask, xs.z, dot);
            dot = dot4_unsigned(raw.codes.w & mask, xs.w, dot);
            scaled = fmaf((float)(dot * (int)(pair >> (8 * j) & 63)), scales[j * WARP] * (1.0f / (1 << (4 * j))), scaled);
            minima = fmaf((float)(pair >> (16 + 8 * j) & 63), sums[j * WARP], minima);
        }
        return half_to_float((u16)raw.head.x) * scaled - half_to_float((u16)(raw.head.x >> 16)) * minima;
    }
};

struct Mxfp4 {
    typedef NoTable Table;
    static constexpr int VALUES = 32, PIECES = 2;
    // Values of a block in the order 0, 16, 1, 17, ..: that of the nibbles.
    static constexpr bool SUMS = false, INTERLEAVED = true;
    struct Raw {
        uint4 codes;
        u8 exponent;
    };
    static __device__ __forceinline__ u32 chunk(u32 piece) { return piece / 2; }
    static __device__ __forceinline__ u32 place(u32 piece) { return piece % 2; }
    static __device__ __forceinline__ u32 piece(u32 chunk, u32 place) { return chunk * 2 + place; }
    static __device__ void fill(u8*, u32) {}
    static __device__ __forceinline__ void load(Raw& raw, const Weights& w, u64 row, u32 columns, u32 chunk) {
        raw.codes = load_once((const uint4*)(w.planes + row * (columns / 2)) + chunk);
        raw.exponent = load_once(w.planes + w.rows * (columns / 2) + row * (columns / 32) + chunk);
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

// scale = most / 127, and 1 / scale: an approximation and one correction with the exact remainder round as divisions
// do. Where all values are below 1e-35, they become zeros.
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
    float most = fabsf(value);
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, distance));
    float inverse = scale_and_inverse(most, scale);
    return __float2int_rn(value * inverse);
}

// Four values of 32 that eight lanes have: their codes, and the scale on every lane. The same as above.
static __device__ __forceinline__ u32 round_four_to_8_bits(float4 v, float* scale) {
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int distance = 4; distance; distance >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, distance));
    float inverse = scale_and_inverse(most, scale);
    u32 x = __float2int_rn(v.x * inverse) & 255, y = __float2int_rn(v.y * inverse) & 255;
    u32 z = __float2int_rn(v.z * inverse) & 255, w = __float2int_rn(v.w * inverse) & 255;
    return x | y << 8 | z << 16 | w << 24;
}

// Rounds a row of inputs into shared memory.
template <class F>
static __device__ __forceinline__ void put_input(const Input& x, const float* values, u32 columns) {
    // Loads of a few rounds at once, for they take long.
    constexpr u32 ROUNDS = 4;
    for (u32 base = threadIdx.x; base < columns / 4; base += ROUNDS * blockDim.x) {
        float4 loaded[ROUNDS];
#pragma unroll
        for (u32 i = 0; i < ROUNDS; i++) {
            u32 quad = base + i * blockDim.x;
            if (quad < columns / 4) loaded[i] = ((const float4*)values)[quad];
        }
#pragma unroll
        for (u32 i = 0; i < ROUNDS; i++) {
            u32 quad = base + i * blockDim.x;
            // The same on all lanes of a warp, for columns are a multiple of 256.
            if (quad < columns / 4) {
                float scale;
                u32 word = round_four_to_8_bits(loaded[i], &scale);
                put<F>(x.codes, quad * 4, word);
                int sum = dot4(word, 0x01010101u, 0);
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                if (quad % 4 == 0) {
                    u32 at = place_of<F>(quad / 4);
                    x.scales[at] = scale;
                    if (F::SUMS) x.sums[at] = scale * (float)sum;
                }
            }
        }
    }
}

// Gate and up products of 32 rows for one expert of one token, activated:
// codes[item, F] and scales[item, F / 32] of weight * mid, and plain[item, F] = mid if wanted.
// Grid: (F / 32, n_used, tokens), 8 warps; a warp has four rows of both matrices, and takes C chunks a lane at a time.
template <class F, int C>
static __device__ __forceinline__ void gate_up(const Weights& gate, const Weights& up, const u32* experts, const float* weights,
                                               const float* input, u32 n_used, u32 columns, u32 rows, float limit,
                                               i8* codes, float* scales, float* plain, u32 copies) {
    extern __shared__ uint4 shared_memory[];
    __shared__ float mids[32];
    u8* memory = (u8*)shared_memory;
    Input x = input_at<F>(memory, columns);
    u8* table_memory = memory;

    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.z, item = token * n_used + blockIdx.y;
    const u32 chunks = columns / F::VALUES, steps = (chunks + C * WARP - 1) / (C * WARP);
    F::fill(table_memory, copies);
    await_previous();
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
    put_input<F>(x, input + (u64)token * columns, columns);
    __syncthreads();
    const typename F::Table table(table_memory, copies);

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

// Which chunks of which row a warp of `down` is at: all slots of a row, then the next row.
struct Walk {
    u32 row;
    u32 slot;
    u32 step;
};

// out[token, row] = sum over slots, in their order, of down(expert of the slot)[row, .] . mid[token, slot, .].
// Grid: (row blocks, tokens), 16 warps; a warp has one row at a time, and loads N chunks a lane while it uses as many.
template <class F, int N>
static __device__ __forceinline__ void down(const Weights& matrix, const u32* experts, const i8* codes,
                                            const float* scales, u32 n_used, u32 columns, u32 rows, float* out,
                                            u32 copies) {
    extern __shared__ uint4 shared_memory[];
    u8* memory = (u8*)shared_memory;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.y;
    const u32 chunks = columns / F::VALUES, steps = (chunks + WARP - 1) / WARP, row_step = gridDim.x * 16;
    const u32* chosen = experts + (u64)token * n_used;
    const Input first = input_at<F>(memory, columns);
    const u32 bytes = memory - (u8*)shared_memory;
    auto input = [&](u32 slot) {
        u32 skip = slot * bytes;
        Input x = {(uint4*)((u8*)first.codes + skip), (float*)((u8*)first.scales + skip),
                   (float*)((u8*)first.sums + skip)};
        return x;
    };
    auto advance = [&](Walk& walk) {
        if (++walk.step == steps) {
            walk.step = 0;
            if (++walk.slot == n_used) {
                walk.slot = 0;
                walk.row += row_step;
            }
        }
    };
    u8* table_memory = (u8*)shared_memory + n_used * bytes;
    F::fill(table_memory, copies);
    await_previous();
    Walk ahead = {warp * gridDim.x + blockIdx.x, 0, 0}, here = ahead;
    typename F::Raw now[N], next[N];
    auto load = [&](typename F::Raw(&raw)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (ahead.row < rows) {
                u64 row = (u64)chosen[ahead.slot] * rows + ahead.row;
                F::load(raw[i], matrix, row, columns, min(ahead.step * WARP + lane, chunks - 1));
            }
            advance(ahead);
        }
    };
    load(now);

    const u32 pieces = columns / 16;
    for (u32 i = threadIdx.x; i < n_used * pieces; i += blockDim.x) {
        uint4 v = ((const uint4*)(codes + (u64)token * n_used * columns))[i];
        float scale = scales[(u64)token * n_used * (columns / 32) + i / 2];
        u32 piece = i % pieces, at = place_of<F>(piece);
        Input x = input(i / pieces);
        if (F::INTERLEAVED) {
            put<F>(x.codes, piece * 16, v.x);
            put<F>(x.codes, piece * 16 + 4, v.y);
            put<F>(x.codes, piece * 16 + 8, v.z);
            put<F>(x.codes, piece * 16 + 12, v.w);
        } else {
            x.codes[at] = v;
        }
        x.scales[at] = scale;
        if (F::SUMS) {
            int sum = dot4(v.x, 0x01010101u, dot4(v.y, 0x01010101u, dot4(v.z, 0x01010101u, dot4(v.w, 0x01010101u, 0))));
            x.sums[at] = scale * (float)sum;
        }
    }
    __syncthreads();
    const typename F::Table table(table_memory, copies);

    float sum = 0.0f;
    while (here.row < rows) {
        load(next);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (here.row < rows) {
                u32 chunk = here.step * WARP + lane, row = here.row;
                Input x = input(here.slot);
                u32 at = chunk < chunks ? here.step * F::PIECES * WARP + lane : lane;
                float dot = F::dot(now[i], x.codes + at, x.scales + at, x.sums + at, table, chunk);
                sum += chunk < chunks ? dot : 0.0f;
                advance(here);
                if (here.row != row) {
                    sum = warp_sum(sum);
                    if (lane == 0) out[(u64)token * rows + row] = sum;
                    sum = 0.0f;
                }
            }
            now[i] = next[i];
        }
    }
}

#define EXPERTS(NAME, F, C, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 3) gate_up_##NAME(                                                \
        const __grid_constant__ Weights gate, const __grid_constant__ Weights up, const u32* experts,                   \
        const float* weights, const float* input, u32 n_used, u32 columns, u32 rows, float limit, i8* codes,            \
        float* scales, float* plain, u32 copies) {                                                                      \
        gate_up<F, C>(gate, up, experts, weights, input, n_used, columns, rows, limit, codes, scales, plain, copies);   \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(512, 2) down_##NAME(                                                   \
        const __grid_constant__ Weights matrix, const u32* experts, const i8* codes, const float* scales, u32 n_used,   \
        u32 columns, u32 rows, float* out, u32 copies) {                                                                \
        down<F, N>(matrix, experts, codes, scales, n_used, columns, rows, out, copies);                                 \
    }

EXPERTS(IQ2_XXS, Iq2Xxs, 2, 3)
EXPERTS(Q2_K, Q2K, 1, 3)
EXPERTS(Q4_K, Q4K, 1, 2)
EXPERTS(MXFP4, Mxfp4, 2, 3)
