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

// Four streams, and what a block that turns them takes at once: columns of each, and tokens if there are many.
#define TURNED_STREAMS 4
#define TURNED_COLUMNS 64
#define TURNED_TOKENS 16
// Rows of the mixer that one of its eight warps has: (2 + 4) * 4 in all.
#define TURNED_ROWS 3
// Columns of a block, of all streams, and fours of those of one stream.
#define TURNED_WIDTH (TURNED_STREAMS * TURNED_COLUMNS)
#define TURNED_QUADS (TURNED_COLUMNS / 4)

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

// A warp's rows of the mixer at the block's columns of every stream: a lane has the fours `lane` and 32 + `lane` of those.
template <typename W, typename Four> struct TurnedMixer {
    Four weights[TURNED_ROWS][2];

    __device__ __forceinline__ void load(const W* mixer, int d, int n) {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < TURNED_ROWS; r++) {
            int row = min(warp + 8 * r, n - 1);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int stream = lane / TURNED_QUADS + h * (TURNED_STREAMS / 2);
                int column = blockIdx.x * TURNED_COLUMNS + lane % TURNED_QUADS * 4;
                weights[r][h] = load_4(mixer + ((u64)row * TURNED_STREAMS + stream) * d + column);
            }
        }
    }

    __device__ __forceinline__ float product(int r, float4 first, float4 second) const {
        return dot_4(widened(weights[r][1]), second, dot_4(widened(weights[r][0]), first, 0.0f));
    }
};

// `hc_post` of one token's four streams in place, and the mixer's products with what comes of it: partials [T, n + 1, slices],
// where a slice is 64 columns of every stream. The bits are those of `hc_turn_tokens`. Grid: slices by tokens; 256 threads, of
// which each turns one column of one stream.
template <typename W, typename Four>
static __device__ __forceinline__ void hc_turn(
    float* all_streams, const float* output, const float* second, const float* post, const float* comb, const W* mixer,
    float* partials, int d, int n, int n_slices) {
    constexpr int M = TURNED_STREAMS;
    __shared__ float4 turned[TURNED_WIDTH / 4];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, k = threadIdx.x / TURNED_COLUMNS;
    const int column = blockIdx.x * TURNED_COLUMNS + threadIdx.x % TURNED_COLUMNS;
    const u64 token = blockIdx.y;
    TurnedMixer<W, Four> rows;
    rows.load(mixer, d, n);
    await_previous_first();
    float* streams = all_streams + token * M * d + column;
    float y[1] = {output[token * d + column]}, old[5][1], factors[5], mixed[1];
#pragma unroll
    for (int j = 0; j < M; j++) {
        old[j][0] = streams[(u64)j * d];
        factors[j] = comb[token * M * M + j * M + k];
    }
    float factor = post[token * M + k];
    if (second) y[0] += second[token * d + column];
    turn_stream(y, old, factor, factors, M, mixed);
    ((float*)turned)[threadIdx.x] = mixed[0];
    __syncthreads();
    // All have read what they change.
    streams[(u64)k * d] = mixed[0];
    float* out = partials + token * (n + 1) * n_slices + blockIdx.x;
    float4 first = turned[lane], last = turned[32 + lane];
#pragma unroll
    for (int r = 0; r < TURNED_ROWS; r++) {
        int row = warp + 8 * r;
        float sum = warp_sum(rows.product(r, first, last));
        if (lane == 0 && row < n) out[(u64)row * n_slices] = sum;
    }
    if (warp != 7) return;
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < M; j++) {
        float4 quad = turned[j * TURNED_QUADS + lane % TURNED_QUADS];
        squares = dot_4(quad, quad, squares);
    }
#pragma unroll
    for (int distance = TURNED_QUADS / 2; distance; distance >>= 1) squares += __shfl_xor_sync(ALL_LANES, squares, distance);
    if (lane == 0) out[(u64)n * n_slices] = squares;
}

// The same for many tokens. Grid: slices by sixteens of tokens; 256 threads, of which each turns four columns of one token.
template <typename W, typename Four>
static __device__ __forceinline__ void hc_turn_tokens(
    float* all_streams, const float* output, const float* second, const float* post, const float* comb, const W* mixer,
    float* partials, int d, int n, int n_slices, int n_tokens) {
    constexpr int M = TURNED_STREAMS, QUADS = TURNED_QUADS;
    __shared__ float4 turned[TURNED_TOKENS][TURNED_WIDTH / 4];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_column = blockIdx.x * TURNED_COLUMNS;
    TurnedMixer<W, Four> rows;
    rows.load(mixer, d, n);
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
                sums[t] = rows.product(r, x[t][0], x[t][1]);
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

#define HC_TURN(NAME, W, FOUR)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 2) hc_turn_##NAME(                                                \
        float* streams, const float* output, const float* second, const float* post, const float* comb, const W* mixer, \
        float* partials, int d, int n, int n_slices) {                                                                  \
        hc_turn<W, FOUR>(streams, output, second, post, comb, mixer, partials, d, n, n_slices);                         \
    }

// One token, or four of several at a time.
HC_MIX(F32_1, float, 1)
HC_MIX(F32_4, float, 4)
HC_MIX(F16_1, u16, 1)
HC_MIX(F16_4, u16, 4)
HC_TURN(F32, float, float4)
HC_TURN(F16, u16, uint2)

// Groups of four columns of a thread that are loaded before they can be used.
#define EARLY 2
// Threads that merge the streams of a token.
#define MERGING 512

static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// `start` plus the values of lanes first, first + step, .., n of them (at most MOST), in this order.
template <int MOST>
static __device__ __forceinline__ float sum_of_lanes(float value, int first, int step, int n, float start) {
    float values[MOST];
#pragma unroll
    for (int i = 0; i < MOST; i++) values[i] = __shfl_sync(ALL_LANES, value, first + min(i, n - 1) * step);
#pragma unroll
    for (int i = 0; i < MOST; i++) start += i < n ? values[i] : 0.0f;
    return start;
}

// How a sub-layer's output will be mixed into the streams: post [T, M] and comb [T, M * M], [old, new], of the partial products
// [T, n + 1, slices] with n = (2 + M) M. One block of 8 warps a token. Nothing needs it before the sub-layer is through.
// MOST: streams that there is room for.
template <int MOST>
static __device__ __forceinline__ void hc_weigh(
    const float* partials, const float* scale, const float* base, float* post, float* comb, int d, int m, int n_slices,
    int iterations, float epsilon, float rms_epsilon) {
    __shared__ float mixes[32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = (2 + m) * m;
    const int at = min(lane, m * m - 1), row = at / m, column = at % m;
    const u64 token = blockIdx.x;
    float scale_post = scale[1], scale_comb = scale[2], base_post = base[m + min(lane, m - 1)], base_comb = base[2 * m + at];
    await_previous();
    // All rows but those of `hc_pre`, the sum of squares last: at most 31.
    const int n_rows = n + 1 - m;
    const float* parts = partials + (token * (n + 1) + m) * n_slices;
    // So many that rows of 64 slices are on their way before one is used.
    float mix[4][2];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            int own = warp + 8 * r, slice = lane + 32 * k;
            mix[r][k] = own < n_rows && slice < n_slices ? parts[own * n_slices + slice] : 0.0f;
        }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int own = warp + 8 * r;
        if (own >= n_rows) break;
        float sum = mix[r][0] + mix[r][1];
#pragma unroll 1
        for (int slice = lane + 64; slice < n_slices; slice += 32) sum += parts[own * n_slices + slice];
        sum = warp_sum(sum);
        if (lane == 0) mixes[own] = sum;
    }
    __syncthreads();
    if (warp > 0) return;
    float mean_factor = inverse_rms(mixes[n_rows - 1], m * d, rms_epsilon);
    if (lane < m) post[token * m + lane] = 2.0f * sigmoid(mixes[lane] * mean_factor * scale_post + base_post);
    float c = mixes[m + at] * mean_factor * scale_comb + base_comb;
    // Sinkhorn: a softmax of the rows, then columns and rows in turn, columns last.
    float largest = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < MOST; i++) largest = fmaxf(largest, __shfl_sync(ALL_LANES, c, row * m + min(i, m - 1)));
    c = expf(c - largest);
    c = c / sum_of_lanes<MOST>(c, row * m, 1, m, 0.0f) + epsilon;
    for (int pass = 0; pass < iterations; pass++) {
        if (pass > 0) c *= reciprocal(sum_of_lanes<MOST>(c, row * m, 1, m, epsilon));
        c *= reciprocal(sum_of_lanes<MOST>(c, column, m, m, epsilon));
    }
    if (lane < m * m) comb[token * m * m + lane] = c;
}

// For four streams, and for up to five.
extern "C" __global__ void __launch_bounds__(256) hc_weigh_4(
    const float* partials, const float* scale, const float* base, float* post, float* comb, int d, int, int n_slices,
    int iterations, float epsilon, float rms_epsilon) {
    hc_weigh<4>(partials, scale, base, post, comb, d, 4, n_slices, iterations, epsilon, rms_epsilon);
}

extern "C" __global__ void __launch_bounds__(256) hc_weigh_5(
    const float* partials, const float* scale, const float* base, float* post, float* comb, int d, int m, int n_slices,
    int iterations, float epsilon, float rms_epsilon) {
    hc_weigh<5>(partials, scale, base, post, comb, d, m, n_slices, iterations, epsilon, rms_epsilon);
}

// Merges the streams, x = sum of pre_j X[j], and norms the result. One block of 512 threads a token.
// partials [n + 1, slices] of a mixer of n rows; x, normed [T, D]. MOST: streams that there is room for.
template <int MOST>
static __device__ __forceinline__ void hc_pre(
    const float* all_streams, const float* partials, const float* scale, const float* base, const float* norm,
    float* x, float* normed, int d, int m, int n, int n_slices, float epsilon, float rms_epsilon) {
    __shared__ float scratch[32];
    __shared__ float mixes[8], bases[8];
    u64 token = blockIdx.x;
    const float* streams = all_streams + token * m * d;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // Weights come from far: they are on their way before anything is waited for, and so is all else that can be.
    float4 early[EARLY][MOST], weights[EARLY];
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        if (i < d) weights[c] = *(const float4*)(norm + i);
    }
    float scale_pre = scale[0], base_pre = base[min(warp, m - 1)];
    await_previous();
    // The first warps sum up the rows that weigh the streams, and the squares.
    const float* parts = partials + (token * (n + 1) + (warp < m ? warp : n)) * n_slices;
    float mix[2];
#pragma unroll
    for (int k = 0; k < 2; k++) mix[k] = warp <= m && lane + 32 * k < n_slices ? parts[lane + 32 * k] : 0.0f;
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        if (i >= d) continue;
#pragma unroll
        for (int j = 0; j < MOST; j++)
            if (j < m) early[c][j] = *(const float4*)(streams + j * d + i);
    }
    if (warp <= m) {
        float sum = mix[0] + mix[1];
#pragma unroll 1
        for (int slice = lane + 64; slice < n_slices; slice += 32) sum += parts[slice];
        sum = warp_sum(sum);
        if (lane == 0) mixes[warp] = sum, bases[warp] = base_pre;
    }
    __syncthreads();
    float mean_factor = inverse_rms(mixes[m], m * d, rms_epsilon);
    float pre[MOST];
#pragma unroll
    for (int j = 0; j < MOST; j++) pre[j] = j < m ? sigmoid(mixes[j] * mean_factor * scale_pre + bases[j]) + epsilon : 0.0f;
    float sum = 0.0f;
    float4 merged[EARLY];
#pragma unroll
    for (int c = 0; c < EARLY; c++) {
        int i = 4 * (threadIdx.x + c * MERGING);
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < d) {
#pragma unroll
            for (int j = 0; j < MOST; j++)
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
            for (int j = 0; j < MOST; j++)
                if (j < m) v = fmaf(pre[j], streams[j * d + i + k], v);
            x[token * d + i + k] = v;
            sum = fmaf(v, v, sum);
        }
    sum = warp_sum(sum);
    if (lane == 0) scratch[warp] = sum;
    __syncthreads();
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

// For four streams, and for up to five.
extern "C" __global__ void __launch_bounds__(MERGING, 2) hc_pre_4(
    const float* all_streams, const float* partials, const float* scale, const float* base, const float* norm,
    float* x, float* normed, int d, int, int n, int n_slices, float epsilon, float rms_epsilon) {
    hc_pre<4>(all_streams, partials, scale, base, norm, x, normed, d, 4, n, n_slices, epsilon, rms_epsilon);
}

extern "C" __global__ void __launch_bounds__(MERGING, 1) hc_pre_5(
    const float* all_streams, const float* partials, const float* scale, const float* base, const float* norm,
    float* x, float* normed, int d, int m, int n, int n_slices, float epsilon, float rms_epsilon) {
    hc_pre<5>(all_streams, partials, scale, base, norm, x, normed, d, m, n, n_slices, epsilon, rms_epsilon);
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
