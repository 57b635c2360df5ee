// Products with few inputs: Q8_0 and F16 weights in planes. A warp has R rows of a matrix and walks along them in chunks of 512
// bytes a row. A row's sum has one order, whatever R is.
//
// The inputs lie in shared memory: for F16 as they are, for Q8_0 as integers of 23 bits in three bytes each, 16 of them sharing a
// scale, so that four products with bytes are one instruction for each of the three: floats would take twelve for them, more
// than there is time for.

struct Part {
    const u8* weights;
    // Of Q8_0, else null.
    const u16* scales;
    float* out;
    // Rows of the matrix, and before which item of the launch they end.
    u32 rows;
    u32 end;
};

struct Parts {
    Part part[8];
    u32 n;
    // Which forms of the inputs the matrices need.
    u32 forms;
};

#define PLAIN 1
#define DIGITS 2

// Place of the float4 `index` of an input: lanes that read at strides of two get banks of their own.
static __device__ __forceinline__ u32 swizzled(u32 index) { return index ^ (index >> 3 & 7); }

extern __shared__ uint4 shared_memory[];

// A value that is kept in a register: the compiler would work it out anew for every use.
static __device__ __forceinline__ u32 kept(u32 value) {
    u32 same;
    asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
    return same;
}

// Copies 16 bytes of weights, or zeros if not `wanted`. What lies behind them is wanted soon.
static __device__ __forceinline__ void copy_weights_or_zero(u32 shared, const void* global, bool wanted) {
    int bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

static __device__ __forceinline__ uint4 load_16_bytes(u32 shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
    return v;
}

static __device__ __forceinline__ u16 load_half(u32 shared) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(shared));
    return v;
}

// Where the forms of TOKENS inputs lie in shared memory, and what lies behind them. Zeros fill up the last chunk.
struct Inputs {
    // [TOKENS, quads] fours of floats.
    float4* plain;
    u32 quads;
    // [TOKENS, 3, groups] of 16 bytes, of the highest, middle and lowest order, and [TOKENS, groups] scales.
    uint4* digits;
    float* scales;
    u32 groups;
    u8* end;
};

static __device__ __forceinline__ Inputs inputs_at(u32 forms, u32 tokens, u32 columns) {
    Inputs x;
    x.plain = (float4*)shared_memory;
    x.quads = (columns + 511) / 512 * 128;
    x.groups = x.quads / 4;
    x.digits = (uint4*)(x.plain + (forms & PLAIN ? tokens * x.quads : 0));
    x.scales = (float*)(x.digits + 3 * tokens * x.groups);
    x.end = forms & DIGITS ? (u8*)(x.scales + tokens * x.groups) : (u8*)x.digits;
    return x;
}

// Four values of an input. Groups of 16 lie in four lanes of a warp.
static __device__ __forceinline__ void put_four(const Inputs& x, u32 forms, u32 token, u32 quad, float4 v) {
    if (forms & PLAIN) x.plain[token * x.quads + swizzled(quad)] = v;
    if (!(forms & DIGITS)) return;
    u32 most = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 2));
    // The largest number of which the highest digit, with what it takes over from the lower ones, is 63.
    const float largest = 63.0f * 65536.0f + 127.0f * 256.0f + 127.0f;
    const float scale = __uint_as_float(most) * (1.0f / largest), inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
    float values[4] = {v.x, v.y, v.z, v.w};
    u32 numbers[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The sum's lower bits are the nearest integer. With 128 added at the two lower digits its bytes are the digits, of which
        // those two are 128 too large.
        float shifted = __fadd_rn(__fmul_rn(values[i], inverse), 12582912.0f);
        numbers[i] = __float_as_uint(shifted) + (0x8080u - 0x4b400000u);
    }
    u32* words = (u32*)(x.digits + 3 * token * x.groups) + quad;
#pragma unroll
    for (int digit = 0; digit < 3; digit++) {
        const u32 first = 2 - digit, pair = first | (first + 4) << 4;
        u32 word = permute(permute(numbers[0], numbers[1], pair), permute(numbers[2], numbers[3], pair), 0x5410);
        words[digit * x.groups * 4] = digit == 0 ? word : word ^ 0x80808080u;
    }
    if (quad % 4 == 0) x.scales[token * x.groups + quad / 4] = scale;
}

// Adds the products of a lane's 16 bytes of R rows with group `group` of TOKENS inputs.
template <int TOKENS, int R>
static __device__ __forceinline__ void multiply_bytes(const uint4 (&weights)[R], const u16 (&scales)[R], const Inputs& x, u32 group,
                                                      float (&sums)[R][TOKENS]) {
    float d[R];
#pragma unroll
    for (int r = 0; r < R; r++) d[r] = half_to_float(scales[r]);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        int dots[R][3];
#pragma unroll
        for (int digit = 0; digit < 3; digit++) {
            uint4 v = x.digits[(3 * t + digit) * x.groups + group];
#pragma unroll
            for (int r = 0; r < R; r++) {
                int dot = dot4(weights[r].x, v.x, 0);
                dot = dot4(weights[r].y, v.y, dot);
                dot = dot4(weights[r].z, v.z, dot);
                dots[r][digit] = dot4(weights[r].w, v.w, dot);
            }
        }
        float scale = x.scales[t * x.groups + group];
#pragma unroll
        for (int r = 0; r < R; r++) {
            float product = fmaf((float)dots[r][0], 65536.0f, (float)(dots[r][1] * 256 + dots[r][2]));
            sums[r][t] = fmaf(d[r] * scale, product, sums[r][t]);
        }
    }
}

// The same of eight F16 weights, which begin at the input's four `quad`.
template <int TOKENS, int R>
static __device__ __forceinline__ void multiply_eight(const uint4 (&weights)[R], const Inputs& inputs, u32 quad,
                                                      float (&sums)[R][TOKENS]) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float w[R][4];
#pragma unroll
        for (int r = 0; r < R; r++) {
            uint4 v = weights[r];
            u32 first = j == 0 ? v.x : v.z, second = j == 0 ? v.y : v.w;
            w[r][0] = half_to_float((u16)first);
            w[r][1] = half_to_float((u16)(first >> 16));
            w[r][2] = half_to_float((u16)second);
            w[r][3] = half_to_float((u16)(second >> 16));
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float4 x = inputs.plain[t * inputs.quads + swizzled(quad + j)];
#pragma unroll
            for (int r = 0; r < R; r++) {
                float sum = fmaf(w[r][0], x.x, sums[r][t]);
                sum = fmaf(w[r][1], x.y, sum);
                sum = fmaf(w[r][2], x.z, sum);
                sums[r][t] = fmaf(w[r][3], x.w, sum);
            }
        }
    }
}

// R rows that a warp is at, of one matrix of a launch.
struct Rows {
    const u8* weights;
    // Of Q8_0, else null.
    const u8* scales;
    // Of a row.
    u32 bytes;
    u32 part;
    u32 first;
    u32 left;
};

// Those of item `item`; group `blockIdx.y` of the rows.
template <int R>
static __device__ __forceinline__ Rows rows_of(const Parts& parts, u32 item, u32 columns, u32 group_rows) {
    u32 part = 0;
    while (item >= parts.part[part].end) part++;
    const Part& p = parts.part[part];
    const u32 in_group = (item - (part ? parts.part[part - 1].end : 0)) * R, row = blockIdx.y * group_rows + in_group;
    Rows rows;
    rows.part = part;
    rows.left = min((u32)R, (parts.n == 1 ? group_rows : p.rows) - in_group);
    rows.bytes = p.scales ? columns : 2 * columns;
    rows.weights = p.weights + (u64)row * rows.bytes;
    rows.scales = p.scales ? (const u8*)p.scales + (u64)row * (columns / 16) : nullptr;
    rows.first = row;
    return rows;
}

// What the input goes through first: a norm with these weights, or it is a gate that is activated and multiplied with `up`, or
// nothing. `number`: epsilon or limit.
struct Before {
    const float *norm, *up;
    float number;
    u32 unused;
};

// Threads of a block for one input, and columns of one that it can norm: a four for each thread.
#define THREADS_OF_ONE 512

// Four of the input's values, zeros behind its end.
static __device__ __forceinline__ float4 four_of(const float* input, u32 quad, u32 columns) {
    return quad < columns / 4 ? ((const float4*)input)[quad] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// As `swiglu` of activations, where nothing is contracted: the same bits.
static __device__ __forceinline__ float gated(float gate, float up, float limit) {
    float g = fminf(gate, limit), u = fminf(fmaxf(up, -limit), limit);
    return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
}

// Puts one input into shared memory, behind what comes before.
static __device__ __forceinline__ void put_input(const Inputs& x, u32 forms, const float* input, const Before& before, u32 columns) {
    __shared__ float squares[THREADS_OF_ONE / WARP];
    const u32 thread = threadIdx.x;
    if (before.up) {
        await_previous();
        for (u32 quad = thread; quad < x.quads; quad += THREADS_OF_ONE) {
            const float4 v = four_of(input, quad, columns), u = four_of(before.up, quad, columns);
            put_four(x, forms, 0, quad, make_float4(gated(v.x, u.x, before.number), gated(v.y, u.y, before.number),
                                                    gated(v.z, u.z, before.number), gated(v.w, u.w, before.number)));
        }
        return;
    }
    if (!before.norm) {
        await_previous();
        // Loads of a few rounds at once, for they take long.
        constexpr u32 ROUNDS = 4;
        for (u32 base = thread; base < x.quads; base += ROUNDS * THREADS_OF_ONE) {
            float4 v[ROUNDS];
#pragma unroll
            for (u32 i = 0; i < ROUNDS; i++) v[i] = four_of(input, base + i * THREADS_OF_ONE, columns);
#pragma unroll
            for (u32 i = 0; i < ROUNDS; i++)
                if (base + i * THREADS_OF_ONE < x.quads) put_four(x, forms, 0, base + i * THREADS_OF_ONE, v[i]);
        }
        return;
    }
    const float4 w = four_of(before.norm, thread, columns);
    await_previous();
    // As `rms_norm` does, which has as many threads or none for the last ones here: the same bits.
    const float4 v = four_of(input, thread, columns);
    float sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
    sum = warp_sum(sum);
    if (thread % WARP == 0) squares[thread / WARP] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < THREADS_OF_ONE / WARP; i++) sum += squares[i];
    const float factor = inverse_rms(sum, columns, before.number);
    if (thread < x.quads)
        put_four(x, forms, 0, thread, make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w));
}

// One input [columns] f32. Weights go through shared memory, where each lane has a ring of S places of its own for 16 bytes and
// a pair of scales of R rows: so many bytes are on their way all the time, and those of the first steps before the kernels
// before have ended, for few registers leave room beside those.
template <int R, int S>
static __device__ __forceinline__ void products_of_one(const Parts& parts, const float* input, const Before& before, u32 columns,
                                                       u32 group_rows) {
    constexpr u32 SCALES = R * 512, STAGE = R * (512 + 128);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 items = parts.part[parts.n - 1].end, item_step = gridDim.x * (blockDim.x / WARP);
    const Inputs x = inputs_at(parts.forms, 1, columns);
    // Where the lane's bytes are in the first place.
    const u32 codes_at = kept(shared_address(x.end) + warp * S * STAGE + lane * 16);
    const u32 scales_at = kept(shared_address(x.end) + warp * S * STAGE + SCALES + lane * 4);
    const u32 lane_bytes = kept(lane * 16), own_scale = kept(scales_at + (lane / 2 & 1) * 2);

    // What is copied next: the lane's bytes of the first row, and where those of the others are.
    u32 item = warp * gridDim.x + blockIdx.x, ahead_item = item;
    const u8 *codes = nullptr, *scales = nullptr;
    u32 left = 0, other_codes[R], other_scales[R];
    auto aim = [&](const Rows& rows) {
        codes = rows.weights + lane * 16;
        scales = rows.scales ? rows.scales + lane / 4 * 4 : nullptr;
        left = rows.bytes;
#pragma unroll
        for (int r = 0; r < R; r++) {
            // Instead of a row beyond the last the first one: loaded, computed and dropped.
            other_codes[r] = r < rows.left ? r * rows.bytes : 0;
            other_scales[r] = r < rows.left ? r * (columns / 16) : 0;
        }
    };
    auto copy = [&](u32 place) {
        if (left) {
            const bool inside = lane_bytes < left;
#pragma unroll
            for (int r = 0; r < R; r++) {
                copy_weights_or_zero(codes_at + place + r * 512, codes + (inside ? other_codes[r] : 0), inside);
                if (scales) copy_word_or_zero(scales_at + place + r * 128, scales + (inside ? other_scales[r] : 0), inside);
            }
            codes += 512;
            if (scales) scales += 32;
            left = left > 512 ? left - 512 : 0;
            if (!left && (ahead_item += item_step) < items) aim(rows_of<R>(parts, ahead_item, columns, group_rows));
        }
        copies_commit();
    };
    Rows rows;
    if (item < items) aim(rows = rows_of<R>(parts, item, columns, group_rows));
#pragma unroll
    for (int i = 0; i < S - 1; i++) copy(i * STAGE);
    put_input(x, parts.forms, input + (u64)blockIdx.y * columns, before, columns);
    __syncthreads();

    // The place that is read next, and the one that was read last.
    u32 place = 0, empty = (S - 1) * STAGE;
    while (item < items) {
        float sums[R][1];
#pragma unroll
        for (int r = 0; r < R; r++) sums[r][0] = 0.0f;
        for (u32 chunk = 0; chunk * 512 < rows.bytes; chunk++) {
            copies_wait<S - 2>();
            uint4 now[R];
            u16 now_scales[R];
#pragma unroll
            for (int r = 0; r < R; r++) {
                now[r] = load_16_bytes(codes_at + place + r * 512);
                now_scales[r] = load_half(own_scale + place + r * 128);
            }
            copy(empty);
            empty = place;
            place = place == (S - 1) * STAGE ? 0 : place + STAGE;
            if (rows.scales) multiply_bytes<1, R>(now, now_scales, x, chunk * WARP + lane, sums);
            else multiply_eight<1, R>(now, x, (chunk * WARP + lane) * 2, sums);
        }
        const Part& p = parts.part[rows.part];
#pragma unroll
        for (int r = 0; r < R; r++) {
            float sum = warp_sum(sums[r][0]);
            if (lane == 0 && r < rows.left) p.out[rows.first + r] = sum;
        }
        item += item_step;
        if (item < items) rows = rows_of<R>(parts, item, columns, group_rows);
    }
}

template <int R, int C> struct Step {
    uint4 weights[C][R];
    u16 scales[C][R];
};

// Some inputs, [TOKENS, stride] f32, of which group `blockIdx.y` of the columns is read. A warp takes C chunks of R rows at once;
// the next are loaded while these are computed.
template <int TOKENS, int R, int C>
static __device__ __forceinline__ void products(const Parts& parts, const float* input, u64 stride, u32 columns,
                                                u32 group_rows, u32 tokens) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Inputs x = inputs_at(parts.forms, TOKENS, columns);
    const u32 items = parts.part[parts.n - 1].end, item_step = gridDim.x * (blockDim.x / WARP);
    Rows rows;
    auto load = [&](Step<R, C>& step, u32 index) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            u32 at = (index * C + c) * 512 + lane * 16;
            bool inside = at < rows.bytes;
#pragma unroll
            for (int r = 0; r < R; r++) {
                // A row beyond the last is the last one again: loaded, computed and dropped.
                u32 own = min((u32)r, rows.left - 1);
                step.weights[c][r] = inside ? load_once((const uint4*)(rows.weights + (u64)own * rows.bytes + at))
                                            : make_uint4(0, 0, 0, 0);
                step.scales[c][r] = inside && rows.scales
                                        ? load_once((const u16*)(rows.scales + own * (columns / 16)) + at / 32) : (u16)0;
            }
        }
    };

    // Blocks take turns, so that few items spread over all multiprocessors.
    u32 item = warp * gridDim.x + blockIdx.x;
    Step<R, C> now, next;
    if (item < items) {
        rows = rows_of<R>(parts, item, columns, group_rows);
        load(now, 0);
    }
    await_previous();
    for (u32 i = threadIdx.x; i < TOKENS * x.quads; i += blockDim.x) {
        u32 token = i / x.quads, quad = i % x.quads;
        const float* from = input + min(token, tokens - 1) * stride + (u64)blockIdx.y * columns;
        put_four(x, parts.forms, token, quad, four_of(from, quad, columns));
    }
    __syncthreads();

    while (item < items) {
        const Rows here = rows;
        const u32 steps = (here.bytes + C * 512 - 1) / (C * 512);
        float sums[R][TOKENS];
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sums[r][t] = 0.0f;
        }
        for (u32 index = 0; index < steps; index++) {
            if (index + 1 < steps) {
                load(next, index + 1);
            } else if (item + item_step < items) {
                rows = rows_of<R>(parts, item + item_step, columns, group_rows);
                load(next, 0);
            }
#pragma unroll
            for (int c = 0; c < C; c++) {
                // Behind the last chunk nothing is multiplied, with any chunk of the input.
                const u32 chunk = (index * C + c) * 512 < here.bytes ? index * C + c : 0;
                if (here.scales) multiply_bytes<TOKENS, R>(now.weights[c], now.scales[c], x, chunk * WARP + lane, sums);
                else multiply_eight<TOKENS, R>(now.weights[c], x, (chunk * WARP + lane) * 2, sums);
            }
            now = next;
        }
        const Part& p = parts.part[here.part];
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float sum = warp_sum(sums[r][t]);
                if (lane == 0 && r < here.left && t < tokens) p.out[(u64)t * p.rows + here.first + r] = sum;
            }
        }
        item += item_step;
    }
}

#define PRODUCTS_OF_ONE(R, S, BLOCKS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS_OF_ONE, BLOCKS) products_1_##R##x##S(                         \
        const __grid_constant__ Parts parts, const float* input, const __grid_constant__ Before before, u32 columns,   \
        u32 group_rows) {                                                                                              \
        products_of_one<R, S>(parts, input, before, columns, group_rows);                                              \
    }

#define PRODUCTS(TOKENS, R, C, BLOCKS)                                                                                \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) products_##TOKENS##_##R(                                \
        const __grid_constant__ Parts parts, const float* input, u64 stride, u32 columns, u32 group_rows,             \
        u32 tokens) {                                                                                                 \
        products<TOKENS, R, C>(parts, input, stride, columns, group_rows, tokens);                                    \
    }

// A multiprocessor has one such block, and with few registers and half of the shared memory one of the next kernel beside it.
PRODUCTS_OF_ONE(1, 4, 2)
PRODUCTS_OF_ONE(1, 8, 2)
#if __CUDA_ARCH__ >= 1000
PRODUCTS_OF_ONE(2, 5, 1)
#else
PRODUCTS_OF_ONE(2, 5, 2)
#endif
PRODUCTS_OF_ONE(4, 3, 1)
PRODUCTS(2, 2, 2, 2)
PRODUCTS(4, 2, 2, 2)
#if __CUDA_ARCH__ >= 1000
PRODUCTS(8, 2, 2, 1)
#else
PRODUCTS(8, 2, 2, 2)
#endif
