// The lightning indexer, (4.6): queries, scores of compressed rows, and the exact choice of the best.

// One warp a head of a token: first those of attention if there are any, [T, n_heads, head_dim], then the indexer's,
// [T, n_index_heads, WIDTH].
#define FINISH_QUERIES(WIDTH, N)                                                                                        \
    extern "C" __global__ void finish_queries_##WIDTH(                                                                  \
        float* queries, float* index_queries, const float* frequencies, const int* positions, int n_tokens,             \
        int n_heads, int head_dim, int n_index_heads, int n_rotary, float epsilon, int official,                        \
        float hadamard_factor) {                                                                                        \
        await_previous();                                                                                               \
        u32 job = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, n = (u32)n_tokens * n_heads;                            \
        if (job < n) {                                                                                                  \
            finish_query(queries + (u64)job * head_dim, frequencies, positions[job / n_heads], head_dim, n_rotary,      \
                         epsilon);                                                                                      \
        } else if ((job -= n) < (u32)n_tokens * n_index_heads) {                                                        \
            finish_index_query<N>(index_queries + (u64)job * WIDTH, frequencies, positions[job / n_index_heads],        \
                                  n_rotary, official, hadamard_factor);                                                 \
        }                                                                                                               \
    }
FINISH_QUERIES(64, 2)
FINISH_QUERIES(128, 4)
FINISH_QUERIES(256, 8)

// (4.6.6) score = sum over heads of weight * max(0, q . k). A block scores 32 rows, one a lane; its 8 warps share the
// heads. Grid: rows by tokens. `skip`: tokens that see at most so many rows need no scores (-1: all do).
// Rows that a token does not see get minus infinity.
template <typename S, int WIDTH>
static __device__ __forceinline__ void index_scores(
    const float* queries, const float* head_weights, const S* rows, const int* positions, float* scores,
    int n_heads, int n_rows, int ratio, int skip, float factor) {
    extern __shared__ float q[];
    __shared__ float sums[8][32];
    int token = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int n_visible = min((positions[token] + 1) / ratio, n_rows), first = blockIdx.x * 32, row = first + lane;
    if (n_visible <= skip) return;
    float* out = scores + (u64)token * n_rows;
    if (first >= n_visible) {
        if (warp == 0 && row < n_rows) out[row] = NEGATIVE_INFINITY;
        return;
    }
    for (int i = threadIdx.x; i < n_heads * WIDTH; i += blockDim.x) q[i] = queries[(u64)token * n_heads * WIDTH + i];
    float k[WIDTH];
    const S* key = rows + (u64)min(row, n_visible - 1) * WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) k[i] = load(key + i);
    __syncthreads();
    float sum = 0.0f;
    for (int head = warp; head < n_heads; head += 8) {
        const float4* from = (const float4*)(q + head * WIDTH);
        float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < WIDTH / 4; i++) {
            float4 part = from[i];
            dots[0] = fmaf(part.x, k[4 * i], dots[0]);
            dots[1] = fmaf(part.y, k[4 * i + 1], dots[1]);
            dots[2] = fmaf(part.z, k[4 * i + 2], dots[2]);
            dots[3] = fmaf(part.w, k[4 * i + 3], dots[3]);
        }
        float dot = (dots[0] + dots[1]) + (dots[2] + dots[3]);
        sum = fmaf(head_weights[(u64)token * n_heads + head] * factor, fmaxf(dot, 0.0f), sum);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && row < n_rows) {
        float all = 0.0f;
        for (int w = 0; w < 8; w++) all += sums[w][lane];
        out[row] = row < n_visible ? all : NEGATIVE_INFINITY;
    }
}

#define INDEX_SCORES(NAME, S, WIDTH)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) index_scores_##NAME(                                              \
        const float* queries, const float* head_weights, const S* rows, const int* positions, float* scores,            \
        int n_heads, int n_rows, int ratio, int skip, float factor) {                                                   \
        await_previous();                                                                                               \
        index_scores<S, WIDTH>(queries, head_weights, rows, positions, scores, n_heads, n_rows, ratio, skip, factor);   \
    }
INDEX_SCORES(half_64, u16, 64)
INDEX_SCORES(half_128, u16, 128)
INDEX_SCORES(float_64, float, 64)
INDEX_SCORES(float_128, float, 128)

// Queries as halves, which loses nothing where they were rounded to FP4. n: a multiple of 4.
extern "C" __global__ void index_halves(const float* queries, u16* halves, u32 n) {
    await_previous();
    u32 i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    float4 v = *(const float4*)(queries + i);
    *(uint2*)(halves + i) = make_uint2(floats_to_halves(v.x, v.y), floats_to_halves(v.z, v.w));
}

// Eight values to shared memory, as halves.
static __device__ __forceinline__ void put_halves(u16* to, const u16* from) { copy_async(shared_address(to), from); }
static __device__ __forceinline__ void put_halves(u16* to, const float* from) {
    float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
    *(uint4*)to = make_uint4(floats_to_halves(a.x, a.y), floats_to_halves(a.z, a.w), floats_to_halves(b.x, b.y),
                             floats_to_halves(b.z, b.w));
}

// Rows and queries of a block of `index_tiles`; most heads.
#define TILE_ROWS 256
#define TILE_QUERIES 32
#define TILE_HEADS 64

// (4.6.6) The scores of `index_scores` for many tokens by tensor cores: the heads of one query are the rows of a tile, its
// columns index rows, 32 a warp, which stay in registers while the queries pass. Products and sums f32.
// Grid: rows by tokens. queries: halves, or f32 to be rounded to them, [T, heads, WIDTH].
template <typename Q, int WIDTH>
static __device__ __forceinline__ void index_tiles(
    const Q* queries, const float* head_weights, const u16* rows, const int* positions, float* scores, int n_tokens,
    int n_heads, int n_rows, int ratio, int skip, float factor) {
    constexpr int PITCH = WIDTH + 8, STEPS = WIDTH / 16, QUERY_BYTES = TILE_HEADS * PITCH * 2;
    extern __shared__ uint4 memory[];
    __shared__ float weights[2][TILE_HEADS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, matrix = lane >> 3, in_matrix = lane & 7;
    const int first_row = blockIdx.x * TILE_ROWS, own_row = first_row + warp * 32, first = blockIdx.y * TILE_QUERIES;
    const int end = min(first + TILE_QUERIES, n_tokens), n_tiles = (n_heads + 15) / 16;
    auto visible = [&](int token) { return min((positions[token] + 1) / ratio, n_rows); };
    // Later tokens see more rows.
    if (visible(end - 1) <= skip) return;

    auto load = [&](int token) {
        u16* to = (u16*)memory + (token & 1) * TILE_HEADS * PITCH;
        const Q* from = queries + (u64)token * n_heads * WIDTH;
#pragma unroll 4
        for (int c = threadIdx.x; c < n_heads * (WIDTH / 8); c += 256) {
            int head = c / (WIDTH / 8), chunk = c % (WIDTH / 8);
            put_halves(to + head * PITCH + chunk * 8, from + head * WIDTH + chunk * 8);
        }
        if (threadIdx.x < n_heads)
            weights[token & 1][threadIdx.x] = head_weights[(u64)token * n_heads + threadIdx.x] * factor;
    };
    // Heads that fill up the last tile are zeros.
    for (int i = threadIdx.x; i < 2 * (n_tiles * 16 - n_heads) * PITCH; i += 256) {
        int each = (n_tiles * 16 - n_heads) * PITCH;
        ((u16*)memory)[i / each * TILE_HEADS * PITCH + n_heads * PITCH + i % each] = 0;
    }
    if (threadIdx.x >= n_heads && threadIdx.x < TILE_HEADS) weights[0][threadIdx.x] = weights[1][threadIdx.x] = 0.0f;
    load(first);
    copies_commit();

    u32 keys[4][STEPS][2];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const u16* row = rows + (u64)min(own_row + t * 8 + (lane >> 2), n_rows - 1) * WIDTH + (lane & 3) * 2;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            keys[t][k][0] = *(const u32*)(row + k * 16);
            keys[t][k][1] = *(const u32*)(row + k * 16 + 8);
        }
    }
    for (int token = first; token < end; token++) {
        copies_wait<0>();
        __syncthreads();
        if (token + 1 < end) load(token + 1);
        copies_commit();
        int n_visible = visible(token);
        if (n_visible <= skip) continue;
        float* out = scores + (u64)token * n_rows;
        float sums[4][2];
#pragma unroll
        for (int t = 0; t < 4; t++) sums[t][0] = sums[t][1] = 0.0f;
        if (own_row < n_visible) {
            const u32 place = shared_address(memory) + (token & 1) * QUERY_BYTES +
                              (((matrix & 1) * 8 + in_matrix) * PITCH + (matrix >> 1) * 8) * 2;
            for (int tile = 0; tile < n_tiles; tile++) {
                float dots[4][4];
#pragma unroll
                for (int t = 0; t < 4; t++)
#pragma unroll
                    for (int j = 0; j < 4; j++) dots[t][j] = 0.0f;
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    u32 q[4];
                    load_matrices(q, place + tile * 16 * PITCH * 2 + k * 32);
#pragma unroll
                    for (int t = 0; t < 4; t++) multiply_tile(dots[t], q, keys[t][k][0], keys[t][k][1]);
                }
                float low = weights[token & 1][tile * 16 + (lane >> 2)], high = weights[token & 1][tile * 16 + 8 + (lane >> 2)];
#pragma unroll
                for (int t = 0; t < 4; t++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        sums[t][j] = fmaf(low, fmaxf(dots[t][j], 0.0f), sums[t][j]);
                        sums[t][j] = fmaf(high, fmaxf(dots[t][j + 2], 0.0f), sums[t][j]);
                    }
            }
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int apart = 4; apart < 32; apart *= 2) sums[t][j] += __shfl_xor_sync(ALL_LANES, sums[t][j], apart);
        }
        // All groups of four lanes have all sums; each of the first four writes a tile's.
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int row = own_row + t * 8 + (lane & 3) * 2 + j;
                if (lane >> 2 == t && row < n_rows) out[row] = row < n_visible ? sums[t][j] : NEGATIVE_INFINITY;
            }
    }
}

#define INDEX_TILES(NAME, Q, WIDTH)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2) index_tiles_##NAME(                                            \
        const Q* queries, const float* head_weights, const u16* rows, const int* positions, float* scores,              \
        int n_tokens, int n_heads, int n_rows, int ratio, int skip, float factor) {                                     \
        await_previous();                                                                                               \
        index_tiles<Q, WIDTH>(queries, head_weights, rows, positions, scores, n_tokens, n_heads, n_rows, ratio, skip,   \
                              factor);                                                                                  \
    }
INDEX_TILES(half_64, u16, 64)
INDEX_TILES(half_128, u16, 128)
INDEX_TILES(float_64, float, 64)
INDEX_TILES(float_128, float, 128)

// Sum of `value` over the threads of a full block before this one; *total over all. `scratch`: 32 values of shared memory.
static __device__ __forceinline__ int sum_before(int value, int* scratch, int* total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, upto = value;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        int other = __shfl_up_sync(ALL_LANES, upto, apart);
        if (lane >= apart) upto += other;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = upto;
    __syncthreads();
    int all = scratch[lane];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        int other = __shfl_up_sync(ALL_LANES, all, apart);
        if (lane >= apart) all += other;
    }
    *total = __shfl_sync(ALL_LANES, all, 31);
    int before = __shfl_sync(ALL_LANES, all, max(warp - 1, 0));
    return (warp ? before : 0) + upto - value;
}

// Threads that choose, and rows that each loads at once.
#define CHOOSING 1024
#define CHOSEN_AT_ONCE 8

// (4.6.7) The best `top_k` of the visible rows, ascending: higher score first, then lower row. One block a token.
// Tokens that see no more rows than that write nothing.
extern "C" __global__ void __launch_bounds__(CHOOSING) choose_rows(
    const float* scores, const int* positions, int* chosen, int n_rows, int ratio, int top_k) {
    await_previous();
    __shared__ int counts[256];
    __shared__ int scratch[32];
    __shared__ u32 found_digit;
    __shared__ int found_above;
    int token = blockIdx.x, n = min((positions[token] + 1) / ratio, n_rows);
    if (n <= top_k) return;
    const float* row = scores + (u64)token * n_rows;
    // Digit by digit from the top: the key of the last row that is taken, and how many with that key are.
    u32 prefix = 0, mask = 0;
    int wanted = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (int base = 0; base < n; base += CHOOSING * CHOSEN_AT_ONCE) {
            u32 keys[CHOSEN_AT_ONCE];
#pragma unroll
            for (int j = 0; j < CHOSEN_AT_ONCE; j++) keys[j] = sort_key(row[min(base + j * CHOOSING + (int)threadIdx.x, n - 1)]);
#pragma unroll
            for (int j = 0; j < CHOSEN_AT_ONCE; j++) {
                if (base + j * CHOOSING >= n) break;
                bool counts_here = base + j * CHOOSING + (int)threadIdx.x < n && (keys[j] & mask) == prefix;
                // Most scores share their first digits: one lane counts for all that have the same.
                u32 digit = counts_here ? keys[j] >> shift & 255 : 256u, same = __match_any_sync(ALL_LANES, digit);
                if (counts_here && (threadIdx.x & 31) == __ffs(same) - 1) atomicAdd(&counts[digit], __popc(same));
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            // Lane l looks after digits 255 - 8 l down to 248 - 8 l.
            int lane = threadIdx.x, own = 0;
            for (int j = 0; j < 8; j++) own += counts[255 - 8 * lane - j];
            int upto = own;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                int other = __shfl_up_sync(ALL_LANES, upto, apart);
                if (lane >= apart) upto += other;
            }
            int above = upto - own;
            if (above < wanted && wanted <= upto) {
                for (int j = 0; j < 8; j++) {
                    int digit = 255 - 8 * lane - j;
                    if (above + counts[digit] >= wanted) {
                        found_digit = digit;
                        found_above = above;
                        break;
                    }
                    above += counts[digit];
                }
            }
        }
        __syncthreads();
        prefix |= found_digit << shift;
        mask |= 255u << shift;
        wanted -= found_above;
        __syncthreads();
    }
    // Each thread has rows that follow each other, so that ranks are sums over threads.
    int each = (n + CHOOSING - 1) / CHOOSING, first = min((int)threadIdx.x * each, n), end = min(first + each, n), total;
    int n_above = 0, n_equal = 0;
    for (int i = first; i < end; i++) {
        u32 key = sort_key(row[i]);
        n_above += key > prefix;
        n_equal += key == prefix;
    }
    int rank = sum_before(n_equal, scratch, &total), place = sum_before(n_above, scratch, &total) + min(rank, wanted);
    for (int i = first; i < end; i++) {
        u32 key = sort_key(row[i]);
        bool equal = key == prefix;
        if (key > prefix || (equal && rank < wanted)) chosen[(u64)token * top_k + place++] = i;
        rank += equal;
    }
}
