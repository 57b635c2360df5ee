// The lightning indexer, (4.6): queries, scores of compressed rows, and the exact choice of the best.

// (4.6.1) Rotation, then Hadamard rotation and rounding. One warp a head of a token, N values a lane.
template <int N>
static __device__ __forceinline__ void index_finish(
    float* queries, const float* frequencies, const int* positions, int n_tokens, int n_heads, int n_rotary,
    int official, float hadamard_factor) {
    u32 job = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    int lane = threadIdx.x & 31;
    if (job >= (u32)n_tokens * n_heads) return;
    int position = positions[job / n_heads];
    float v[N], *head = queries + (u64)job * 32 * N + lane * N;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        float2 pair = {head[i], head[i + 1]};
        int rotary = lane * N + i - (32 * N - 2 * n_rotary);
        if (rotary >= 0) pair = rotate(pair, rotary_angle(position, frequencies[rotary / 2]));
        v[i] = pair.x;
        v[i + 1] = pair.y;
    }
    if (official) rotate_and_round_to_fp4(v, lane, hadamard_factor);
#pragma unroll
    for (int i = 0; i < N; i++) head[i] = v[i];
}

#define INDEX_FINISH(WIDTH, N)                                                                                          \
    extern "C" __global__ void index_finish_##WIDTH(                                                                    \
        float* queries, const float* frequencies, const int* positions, int n_tokens, int n_heads, int n_rotary,        \
        int official, float hadamard_factor) {                                                                          \
        await_previous();                                                                                               \
        index_finish<N>(queries, frequencies, positions, n_tokens, n_heads, n_rotary, official, hadamard_factor);       \
    }
INDEX_FINISH(64, 2)
INDEX_FINISH(128, 4)
INDEX_FINISH(256, 8)

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

// Sum of `flag` over the threads before this one; *total over all. `scratch`: 32 values of shared memory.
static __device__ __forceinline__ int rank_in_block(bool flag, int* scratch, int* total) {
    u32 votes = __ballot_sync(~0u, flag);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    __syncthreads();
    if (lane == 0) scratch[warp] = __popc(votes);
    __syncthreads();
    int count = lane < n_warps ? scratch[lane] : 0, before = count;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        int other = __shfl_up_sync(~0u, before, apart);
        if (lane >= apart) before += other;
    }
    *total = __shfl_sync(~0u, before, 31);
    int mine = __shfl_sync(~0u, before - count, warp);
    return mine + __popc(votes & ((1u << lane) - 1u));
}

// (4.6.7) The best `top_k` of the visible rows, ascending: higher score first, then lower row. One block of 1024 a token.
// Tokens that see no more rows than that write nothing.
extern "C" __global__ void __launch_bounds__(1024) choose_rows(
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
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            u32 key = sort_key(row[i]);
            if ((key & mask) == prefix) atomicAdd(&counts[key >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            // Lane l looks after digits 255 - 8 l down to 248 - 8 l.
            int lane = threadIdx.x, own = 0;
            for (int j = 0; j < 8; j++) own += counts[255 - 8 * lane - j];
            int upto = own;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                int other = __shfl_up_sync(~0u, upto, apart);
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
    int n_taken = 0, n_equal = 0;
    for (int base = 0; base < n; base += blockDim.x) {
        int i = base + threadIdx.x, total;
        u32 key = i < n ? sort_key(row[i]) : 0u;
        bool equal = i < n && key == prefix;
        int rank = n_equal + rank_in_block(equal, scratch, &total);
        n_equal += total;
        bool taken = i < n && (key > prefix || (equal && rank < wanted));
        int place = n_taken + rank_in_block(taken, scratch, &total);
        n_taken += total;
        if (taken) chosen[(u64)token * top_k + place] = i;
    }
}
