// Hyper-connections, (3.6): M streams of width D, at most 5; M * M lanes of a warp hold the mixing matrix.

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Columns of a slice of the mixer, which a block multiplies alone.
#define SLICE 256
// Most rows of the mixer that a warp has: (2 + M) M of at most 35 over 8 warps.
#define MIXER_ROWS 5

static __device__ __forceinline__ void load_8(const float* from, float* v) {
    float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Eight weights as they are stored: F16 takes half the registers of what it is widened to.
template <typename W> struct Eight;

template <> struct Eight<float> {
    float values[8];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = 0.0f;
    }
    __device__ __forceinline__ void load(const float* from) { load_8(from, values); }
    __device__ __forceinline__ float value(int i) const { return values[i]; }
};

template <> struct Eight<u16> {
    u32 pairs[4];
    __device__ __forceinline__ void clear() { pairs[0] = pairs[1] = pairs[2] = pairs[3] = 0; }
    __device__ __forceinline__ void load(const u16* from) {
        uint4 raw = *(const uint4*)from;
        pairs[0] = raw.x, pairs[1] = raw.y, pairs[2] = raw.z, pairs[3] = raw.w;
    }
    __device__ __forceinline__ float value(int i) const { return half_to_float((u16)(pairs[i / 2] >> (i % 2 * 16))); }
};

// `warp_sum` of each of some values, a power of two of them, with its bits but fewer exchanges: lanes that hold two values give one
// away and keep the other. sums[0] is then that of the value whose number is returned.
template <int N> static __device__ __forceinline__ int sums_of_warp(float (&sums)[N]) {
    int lane = threadIdx.x & 31, number = 0;
#pragma unroll
    for (int distance = 16, count = N; distance; distance >>= 1) {
        if (count > 1) {
            count /= 2;
            bool upper = lane & distance;
            if (upper) number += count;
#pragma unroll
            for (int i = 0; i < count; i++) {
                float given = upper ? sums[i] : sums[i + count], kept = upper ? sums[i + count] : sums[i];
                sums[i] = kept + __shfl_xor_sync(ALL_LANES, given, distance);
            }
        } else {
            sums[0] += __shfl_xor_sync(ALL_LANES, sums[0], distance);
        }
    }
    return number;
}

// A warp's rows of a slice of the mixer, eight columns a lane.
template <typename W> struct MixerSlice {
    Eight<W> weights[MIXER_ROWS];

    __device__ __forceinline__ void load(const W* mixer, int width, int n) {
        int warp = threadIdx.x >> 5, at = blockIdx.x * SLICE + (threadIdx.x & 31) * 8;
#pragma unroll
        for (int r = 0; r < MIXER_ROWS; r++) {
            int row = warp + 8 * r;
            weights[r].clear();
            if (row < n && at < width) weights[r].load(mixer + (u64)row * width + at);
        }
    }

    // Products with the streams of some tokens, and their sums of squares: partials [T, n + 1, slices].
    template <int TOKENS>
    __device__ __forceinline__ void multiply(const float (&x)[TOKENS][8], float* out, int n, int n_slices, int n_tokens) {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        // Behind the last row of the mixer comes the sum of squares.
#pragma unroll
        for (int r = 0; r <= MIXER_ROWS; r++) {
            int row = r < MIXER_ROWS ? warp + 8 * r : n;
            if (r < MIXER_ROWS ? row >= n : warp != 7) continue;
            float sums[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                sums[t] = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sums[t] = fmaf(r < MIXER_ROWS ? weights[min(r, MIXER_ROWS - 1)].value(i) : x[t][i], x[t][i], sums[t]);
            }
            int token = sums_of_warp(sums);
            if ((lane & (32 / TOKENS - 1)) == 0 && token < n_tokens)
                out[(u64)(token * (n + 1) + row) * n_slices + blockIdx.x] = sums[0];
        }
    }
};

// Products of the mixer [n, width] with a slice of the streams, and the slice's sum of squares behind them:
// partials [T, n + 1, slices]. Grid: slices by groups of tokens, which are one token or come several at once; 8 warps; width a
// multiple of 8.
template <typename W, int TOKENS_AT_ONCE>
static __device__ __forceinline__ void hc_mix(
    const float* streams, const W* mixer, float* partials, int n_tokens, int width, int n, int n_slices, int group) {
    int at = blockIdx.x * SLICE + (threadIdx.x & 31) * 8;
    MixerSlice<W> slice;
    slice.load(mixer, width, n);
    await_previous();
    int first = blockIdx.y * group, end = min(first + group, n_tokens);
    float x[TOKENS_AT_ONCE][8];
    auto fetch = [&](int token, float (&to)[TOKENS_AT_ONCE][8]) {
#pragma unroll
        for (int t = 0; t < TOKENS_AT_ONCE; t++) {
#pragma unroll
            for (int i = 0; i < 8; i++) to[t][i] = 0.0f;
            if (at < width) load_8(streams + (u64)min(token + t, end - 1) * width + at, to[t]);
        }
    };
    fetch(first, x);
    for (int token = first; token < end; token += TOKENS_AT_ONCE) {
        float next[TOKENS_AT_ONCE][8];
        // While some tokens are multiplied, the next are on their way.
        bool goes_on = TOKENS_AT_ONCE > 1 && token + TOKENS_AT_ONCE < end;
        if (goes_on) fetch(token + TOKENS_AT_ONCE, next);
        slice.multiply(x, partials + (u64)token * (n + 1) * n_slices, n, n_slices, end - token);
        if (!goes_on) break;
#pragma unroll
        for (int t = 0; t < TOKENS_AT_ONCE; t++) {
#pragma unroll
            for (int i = 0; i < 8; i++) x[t][i] = next[t][i];
        }
    }
}

// X'[k] = post_k y + sum over j of C[j, k] X[j], for one k and as many columns as there are.
template <int COLUMNS>
static __device__ __forceinline__ void turn_stream(
    const float (&y)[COLUMNS], const float (&old)[5][COLUMNS], float post, const float (&comb)[5], int m, float (&mixed)[COLUMNS]) {
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) mixed[i] = post * y[i];
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (j < m) {
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) mixed[i] = fmaf(comb[j], old[j][i], mixed[i]);
        }
}

// `hc_post`, written to other memory since blocks read what others change, and `hc_mix` of what comes of it, with the bits
// of those two. One slice lies in one stream: d is a multiple of SLICE. Grid: slices by tokens.
template <typename W>
static __device__ __forceinline__ void hc_turn(
    const float* all_streams, const float* output, const float* second, const float* post, const float* comb, float* turned,
    const W* mixer, float* partials, int d, int m, int n, int n_slices) {
    int width = m * d, at = blockIdx.x * SLICE + (threadIdx.x & 31) * 8, k = blockIdx.x * SLICE / d, column = at - k * d;
    u64 token = blockIdx.y;
    MixerSlice<W> slice;
    slice.load(mixer, width, n);
    await_previous();
    float y[8], old[5][8], factors[5], x[1][8];
    load_8(output + token * d + column, y);
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (j < m) {
            load_8(all_streams + token * width + (u64)j * d + column, old[j]);
            factors[j] = comb[token * m * m + j * m + k];
        }
    float factor = post[token * m + k];
    if (second) {
        float other[8];
        load_8(second + token * d + column, other);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] += other[i];
    }
    turn_stream(y, old, factor, factors, m, x[0]);
    if (threadIdx.x < 32) {
        float4* to = (float4*)(turned + token * width + at);
        to[0] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
        to[1] = make_float4(x[0][4], x[0][5], x[0][6], x[0][7]);
    }
    slice.multiply(x, partials + token * (n + 1) * n_slices, n, n_slices, 1);
}

// Four streams, and what a block of `hc_turn_tokens` takes at once: columns of each, and tokens.
#define TURNED_STREAMS 4
#define TURNED_COLUMNS 64
#define TURNED_TOKENS 16
// Rows of the mixer that one of its eight warps has: (2 + 4) * 4 in all.
#define TURNED_ROWS 3

// Four weights as they are stored, and widened.
static __device__ __forceinline__ float4 load_4(const float* from) { return *(const float4*)from; }

static __device__ __forceinline__ uint2 load_4(const u16* from) { return *(const uint2*)from; }

static __device__ __forceinline__ float4 widened(float4 weights) { return weights; }

static __device__ __forceinline__ float4 widened(uint2 weights) {
    return make_float4(half_to_float((u16)weights.x), half_to_float((u16)(weights.x >> 16)), half_to_float((u16)weights.y),
                       half_to_float((u16)(weights.y >> 16)));
}

// sum of products, in the order of x, y, z, w.
static __device__ __forceinline__ float dot_4(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// `hc_post` of four streams in place, and the mixer's products with what comes of it: partials [T, n + 1, slices], where a
// slice is 64 columns of every stream. Grid: slices by sixteens of tokens; 256 threads, each of which turns four columns of
// one token.
template <typename W, typename Four>
static __device__ __forceinline__ void hc_turn_tokens(
    float* all_streams, const float* output, const float* second, const float* post, const float* comb, const W* mixer,
    float* partials, int d, int n, int n_slices, int n_tokens) {
    constexpr int M = TURNED_STREAMS, WIDTH = M * TURNED_COLUMNS, QUADS = TURNED_COLUMNS / 4;
    __shared__ float4 turned[TURNED_TOKENS][WIDTH / 4];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_column = blockIdx.x * TURNED_COLUMNS;
    // A lane has columns 4 lane .. and 128 + 4 lane .. of the slice.
    Four weights[TURNED_ROWS][2];
#pragma unroll
    for (int r = 0; r < TURNED_ROWS; r++) {
        int row = min(warp + 8 * r, n - 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int stream = lane / QUADS + h * (M / 2), column = first_column + lane % QUADS * 4;
            weights[r][h] = load_4(mixer + (u64)row * M * d + stream * d + column);
        }
    }
    await_previous();
    const int own = threadIdx.x / QUADS, quad = threadIdx.x % QUADS, first_token = blockIdx.y * TURNED_TOKENS;
    const int token = min(first_token + own, n_tokens - 1), column = first_column + quad * 4;
    float* streams = all_streams + (u64)token * M * d + column;
    float4 y = load_4(output + (u64)token * d + column), old[M];
#pragma unroll
    for (int j = 0; j < M; j++) old[j] = load_4(streams + j * d);
    if (second) {
        float4 other = load_4(second + (u64)token * d + column);
        y.x += other.x, y.y += other.y, y.z += other.z, y.w += other.w;
    }
    float4 factors[M], posts = load_4(post + token * M);
#pragma unroll
    for (int j = 0; j < M; j++) factors[j] = load_4(comb + token * M * M + j * M);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < M; k++) {
        float by = k == 0 ? posts.x : k == 1 ? posts.y : k == 2 ? posts.z : posts.w;
        float4 mixed = make_float4(by * y.x, by * y.y, by * y.z, by * y.w);
#pragma unroll
        for (int j = 0; j < M; j++) {
            float c = k == 0 ? factors[j].x : k == 1 ? factors[j].y : k == 2 ? factors[j].z : factors[j].w;
            mixed.x = fmaf(c, old[j].x, mixed.x);
            mixed.y = fmaf(c, old[j].y, mixed.y);
            mixed.z = fmaf(c, old[j].z, mixed.z);
            mixed.w = fmaf(c, old[j].w, mixed.w);
        }
        if (first_token + own < n_tokens) *(float4*)(streams + k * d) = mixed;
        turned[own][k * QUADS + quad] = mixed;
        squares = dot_4(mixed, mixed, squares);
    }
#pragma unroll
    for (int distance = QUADS / 2; distance; distance >>= 1) squares += __shfl_xor_sync(ALL_LANES, squares, distance);
    auto out = [&](int token, int row) { return partials + ((u64)token * (n + 1) + row) * n_slices + blockIdx.x; };
    if (quad == 0 && first_token + own < n_tokens) *out(token, n) = squares;
    __syncthreads();
    constexpr int AT_ONCE = 4;
    for (int base = 0; base < TURNED_TOKENS; base += AT_ONCE) {
        float4 x[AT_ONCE][2];
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            x[t][0] = turned[base + t][lane];
            x[t][1] = turned[base + t][32 + lane];
        }
#pragma unroll
        for (int r = 0; r < TURNED_ROWS; r++) {
            float sums[AT_ONCE];
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++) {
                float first = dot_4(widened(weights[r][0]), x[t][0], 0.0f);
                sums[t] = dot_4(widened(weights[r][1]), x[t][1], first);
            }
            int row = warp + 8 * r, token = first_token + base + sums_of_warp(sums);
            if (lane % (32 / AT_ONCE) == 0 && token < n_tokens && row < n) *out(token, row) = sums[0];
        }
    }
}

#define HC_TURN_TOKENS(NAME, W, FOUR, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) hc_turn_tokens_##NAME(                                    \
        float* streams, const float* output, const float* second, const float* post, const float* comb, const W* mixer, \
        float* partials, int d, int n, int n_slices, int n_tokens) {                                                    \
        hc_turn_tokens<W, FOUR>(streams, output, second, post, comb, mixer, partials, d, n, n_slices, n_tokens);        \
    }

HC_TURN_TOKENS(F32, float, float4, 2)
HC_TURN_TOKENS(F16, u16, uint2, 3)

#define HC_MIX(NAME, W, TOKENS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 1) hc_mix_##NAME(                                                    \
        const float* streams, const W* mixer, float* partials, int n_tokens, int width, int n, int n_slices, int group) { \
        hc_mix<W, TOKENS>(streams, mixer, partials, n_tokens, width, n, n_slices, group);                               \
    }

#define HC_TURN(NAME, W)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 1) hc_turn_##NAME(                                                   \
        const float* streams, const float* output, const float* second, const float* post, const float* comb,           \
        float* turned, const W* mixer, float* partials, int d, int m, int n, int n_slices) { \
        hc_turn<W>(streams, output, second, post, comb, turned, mixer, partials, d, m, n, n_slices);                    \
    }

// One token, or four of several at a time.
HC_MIX(F32_1, float, 1)
HC_MIX(F32_4, float, 4)
HC_MIX(F16_1, u16, 1)
HC_MIX(F16_4, u16, 4)
HC_TURN(F32, float)
HC_TURN(F16, u16)

// Groups of four columns of a thread that are loaded before they can be used.
#define EARLY 2
// Threads that merge; one more warp works on the mixing matrix meanwhile.
#define MERGING 512

static __device__ __forceinline__ void wait_for_merging() { asm volatile("bar.sync 1, 512;" ::: "memory"); }

static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// `start` plus the values of lanes first, first + step, .., n of them (at most 5), in this order.
static __device__ __forceinline__ float sum_of_lanes(float value, int first, int step, int n, float start) {
    float values[5];
#pragma unroll
    for (int i = 0; i < 5; i++) values[i] = __shfl_sync(ALL_LANES, value, first + min(i, n - 1) * step);
#pragma unroll
    for (int i = 0; i < 5; i++) start += i < n ? values[i] : 0.0f;
    return start;
}

// Merges the streams, x = sum of pre_j X[j], and norms the result. One block of 544 threads a token.
// partials: of hc_mix, [n + 1, slices], n = (2 + M) M, or M for the head's (then no post and comb).
// x, normed [T, D]; post [T, M]; comb [T, M * M], [old, new].
extern "C" __global__ void __launch_bounds__(544, 1) hc_pre(
    const float* all_streams, const float* partials, const float* scale, const float* base, const float* norm,
    float* x, float* normed, float* post, float* comb, int d, int m, int n_slices, int iterations, float epsilon,
    float rms_epsilon) {
    __shared__ float scratch[32];
    __shared__ float mixes[40];
    u64 token = blockIdx.x;
    const float* streams = all_streams + token * m * d;
    int n = post ? (2 + m) * m : m, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n_warps = blockDim.x >> 5;
    bool merging = threadIdx.x < MERGING;
    // Weights come from far: they are on their way before anything is waited for, and so is all else that can be.
    float4 early[EARLY][5], weights[EARLY];
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        if (merging && i < d) weights[c] = *(const float4*)(norm + i);
    }
    int at = min(lane, m * m - 1), row_of_lane = at / m, column_of_lane = at % m;
    float scale_pre = scale[0], base_pre[5], scale_post = 0.0f, scale_comb = 0.0f, base_post = 0.0f, base_comb = 0.0f;
#pragma unroll
    for (int j = 0; j < 5; j++) base_pre[j] = base[min(j, m - 1)];
    if (post) {
        scale_post = scale[1], scale_comb = scale[2];
        base_post = base[m + min(lane, m - 1)], base_comb = base[2 * m + at];
    }
    await_previous();
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        if (!merging || i >= d) continue;
#pragma unroll
        for (int j = 0; j < 5; j++)
            if (j < m) early[c][j] = *(const float4*)(streams + j * d + i);
    }
    const float* parts = partials + token * n_slices * (n + 1);
    float mix[3][4];
#pragma unroll
    for (int r = 0; r < 3; r++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int row = warp + r * n_warps, slice = lane + 32 * k;
            mix[r][k] = row <= n && slice < n_slices ? parts[row * n_slices + slice] : 0.0f;
        }
#pragma unroll
    for (int r = 0; r < 3; r++) {
        int row = warp + r * n_warps;
        if (row > n) break;
        float sum = (mix[r][0] + mix[r][1]) + (mix[r][2] + mix[r][3]);
        for (int slice = lane + 128; slice < n_slices; slice += 32) sum += parts[row * n_slices + slice];
        sum = warp_sum(sum);
        if (lane == 0) mixes[row] = sum;
    }
    __syncthreads();
    float mean_factor = inverse_rms(mixes[n], m * d, rms_epsilon);
    if (!merging) {
        if (!post) return;
        int n_comb = m * m;
        if (lane < m)
            post[token * m + lane] = 2.0f * sigmoid(mixes[m + lane] * mean_factor * scale_post + base_post);
        int row = row_of_lane, column = column_of_lane;
        float c = mixes[2 * m + at] * mean_factor * scale_comb + base_comb;
        // Sinkhorn: a softmax of the rows, then columns and rows in turn, columns last.
        float largest = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 0; i < 5; i++) largest = fmaxf(largest, __shfl_sync(ALL_LANES, c, row * m + min(i, m - 1)));
        c = expf(c - largest);
        c = c / sum_of_lanes(c, row * m, 1, m, 0.0f) + epsilon;
        for (int pass = 0; pass < iterations; pass++) {
            if (pass > 0) c *= reciprocal(sum_of_lanes(c, row * m, 1, m, epsilon));
            c *= reciprocal(sum_of_lanes(c, column, m, m, epsilon));
        }
        if (lane < n_comb) comb[token * n_comb + lane] = c;
        return;
    }
    float pre[5];
#pragma unroll
    for (int j = 0; j < 5; j++) pre[j] = j < m ? sigmoid(mixes[j] * mean_factor * scale_pre + base_pre[j]) + epsilon : 0.0f;
    float sum = 0.0f;
    float4 merged[EARLY];
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < d) {
#pragma unroll
            for (int j = 0; j < 5; j++)
                if (j < m) {
                    v.x = fmaf(pre[j], early[c][j].x, v.x);
                    v.y = fmaf(pre[j], early[c][j].y, v.y);
                    v.z = fmaf(pre[j], early[c][j].z, v.z);
                    v.w = fmaf(pre[j], early[c][j].w, v.w);
                }
            *(float4*)(x + token * d + i) = v;
        }
        merged[c] = v;
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
    }
    for (int i = 4 * (threadIdx.x + EARLY * MERGING); i < d; i += 4 * MERGING)
        for (int k = 0; k < 4; k++) {
            float v = 0.0f;
#pragma unroll
            for (int j = 0; j < 5; j++)
                if (j < m) v = fmaf(pre[j], streams[j * d + i + k], v);
            x[token * d + i + k] = v;
            sum = fmaf(v, v, sum);
        }
    sum = warp_sum(sum);
    if (lane == 0) scratch[warp] = sum;
    wait_for_merging();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < MERGING / 32; w++) sum += scratch[w];
    float factor = inverse_rms(sum, d, rms_epsilon);
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        if (i >= d) continue;
        float4 w = weights[c], v = merged[c];
        v.x = v.x * factor * w.x, v.y = v.y * factor * w.y, v.z = v.z * factor * w.z, v.w = v.w * factor * w.w;
        *(float4*)(normed + token * d + i) = v;
    }
    for (int i = 4 * (threadIdx.x + EARLY * MERGING); i < d; i += 4 * MERGING)
        for (int k = 0; k < 4; k++) normed[token * d + i + k] = x[token * d + i + k] * factor * norm[i + k];
}

// X'[k] = post_k y + sum over j of C[j, k] X[j]; y = output, plus `second` if not null. Grid: columns by tokens.
extern "C" __global__ void hc_post(
    float* all_streams, const float* output, const float* second, const float* post, const float* comb, int d, int m) {
    await_previous();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u64 token = blockIdx.y;
    if (i >= d) return;
    float* streams = all_streams + token * m * d + i;
    float y[1] = {output[token * d + i]}, old[5][1], factors[5], mixed[1];
    if (second) y[0] += second[token * d + i];
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (j < m) old[j][0] = streams[(u64)j * d];
    for (int k = 0; k < m; k++) {
#pragma unroll
        for (int j = 0; j < 5; j++)
            if (j < m) factors[j] = comb[token * m * m + j * m + k];
        turn_stream(y, old, post[token * m + k], factors, m, mixed);
        streams[(u64)k * d] = mixed[0];
    }
}
