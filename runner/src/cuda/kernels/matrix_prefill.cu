// Products with many inputs, by tensor cores: weights are widened to f16 in registers, straight into the left operand;
// inputs are f16; sums are f32.
//
// On the H100 and H200 a group of four warps multiplies 64 rows by all inputs of a tile at once, which the tensor cores read from
// shared memory by themselves, while its next weights are widened (`wgmma`); elsewhere a warp has 16 rows (`mma`).
//
// A block has 256 or 512 rows (of an expert half of them of gate and the same of up) and up to 64 or 128 inputs. Codes and
// inputs come through shared memory, two to four steps of KC columns deep, so that they fit a block's 99 KiB of the smaller
// chips. The columns of a step are permuted so that the eight weights that a lane holds of one row in one go are neighbours in
// the format's bytes; inputs are stored in that order beforehand. A sum's order is that of the columns, whatever else is
// computed with it.

// out[token, row] = matrix[row, .] . x[token, group of the row, .].
// Grid: (token tiles, row tiles of a group, groups).
template <class F>
static __device__ __forceinline__ void dense(const Weights& matrix, const u16* x, u64 stride, u32 columns, u32 group_rows,
                                             u32 tokens, float* out) {
    constexpr int M = DENSE_ROWS / (THREADS / WARP * 16), N = DENSE_TOKENS / 8;
    typedef Stages<F, DENSE_ROWS, DENSE_TOKENS> At;
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[DENSE_TOKENS];
    const u32 first_token = blockIdx.x * DENSE_TOKENS, first = blockIdx.y * DENSE_ROWS, group = blockIdx.z;
    if (threadIdx.x < DENSE_TOKENS) rows_of_x[threadIdx.x] = first_token + threadIdx.x;
    u8* memory = stages_in(shared_memory);
    F::fill(memory + At::ALL_BYTES);
    Pipeline pipeline = pipeline_of_block();
    __syncthreads();
    Inputs inputs = {x + (u64)group * columns, stride, rows_of_x, min(tokens - first_token, (u32)DENSE_TOKENS)};
    float sums[M][N][4];
    const Rows<false> rows = {matrix, matrix, group * group_rows + first, group * group_rows + group_rows - 1};
    tile<F, M, N>(sums, rows, columns, inputs, memory, memory + At::ALL_BYTES, pipeline);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first + (warp * M + m) * 16 + i / 2 * 8 + g, token = n * 8 + t * 2 + i % 2;
                if (row < group_rows && token < inputs.count) {
                    out[(u64)(first_token + token) * matrix.rows + (u64)group * group_rows + row] = sums[m][n][i];
                }
            }
        }
    }
}

// Items sorted by expert: starts[e] .. starts[e + 1] are those of expert e, in the order of `order`.
// Tiles of all experts: before[e] (shared memory) counts the tiles of the experts before e.
static __device__ __forceinline__ u32 count_tiles(const u32* starts, u32 n_experts, u32* before) {
    __shared__ u32 warp_sums[THREADS / WARP];
    __shared__ u32 total;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (u32 base = 0; base < n_experts; base += THREADS) {
        u32 e = base + threadIdx.x;
        u32 own = e < n_experts ? (starts[e + 1] - starts[e] + EXPERT_TOKENS - 1) / EXPERT_TOKENS : 0, sum = own;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            u32 other = __shfl_up_sync(ALL_LANES, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (lane == WARP - 1) warp_sums[warp] = sum;
        __syncthreads();
        u32 earlier = total;
        for (u32 w = 0; w < warp; w++) earlier += warp_sums[w];
        if (e < n_experts) before[e] = earlier + sum - own;
        __syncthreads();
        if (threadIdx.x == THREADS - 1) total = earlier + sum;
        __syncthreads();
    }
    return total;
}

// The last expert whose tiles begin at or before `tile`.
static __device__ __forceinline__ u32 expert_of(const u32* before, u32 n_experts, u32 tile) {
    u32 low = 0, high = n_experts;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (before[middle] <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Where the values 2 pair and 2 pair + 1 of a piece of eight are among the columns of a step. Those that one lane multiplies
// are neighbours for `mma`; `wgmma` has an order of its own, in each 32 columns.
static __device__ __forceinline__ u32 place_of_pair(u32 piece, u32 pair) {
#if WARP_GROUPS
    return piece / 4 * 32 + pair * 8 + piece % 4 * 2;
#else
    return piece * 8 + pair * 2;
#endif
}

// Place of a column among those of its step in the order that a format wants; `pieces` has a hexadecimal digit for each
// piece of eight columns.
static __device__ __forceinline__ u32 permuted(u32 column, u64 pieces, u32 step_columns) {
    u32 within = column % step_columns;
    return column - within + place_of_pair(pieces >> (within / 8 * 4) & 15, within % 8 / 2) + within % 2;
}

// What the kernels for experts share.
struct Sorted {
    const u32* starts;
    // Item at each place.
    const u32* order;
    u32 n_experts;
    u32 unused;
};

// A tile of the work of `gate_up` and `down`, in shared memory: what is needed again behind the products need not stay in
// registers meanwhile.
struct Tile {
    u32 expert;
    u32 first_row;
    u32 place;
    u32 count;
};

// Tile `index` of those of all experts; tiles of the same weights follow each other.
static __device__ __forceinline__ void find_tile(volatile Tile& tile, const Sorted& sorted, const u32* before, u32 index,
                                                 u32 row_tiles, u32 tile_rows) {
    u32 expert = expert_of(before, sorted.n_experts, index / row_tiles);
    u32 start = sorted.starts[expert], end = sorted.starts[expert + 1];
    u32 expert_tiles = (end - start + EXPERT_TOKENS - 1) / EXPERT_TOKENS, within = index - before[expert] * row_tiles;
    u32 place = start + within % expert_tiles * EXPERT_TOKENS;
    tile.expert = expert;
    tile.first_row = within / expert_tiles * tile_rows;
    tile.place = place;
    tile.count = min(end - place, (u32)EXPERT_TOKENS);
}

// mids[place, .] = weight * swiglu(gate x, up x) as f16, in the order that the down product wants;
// plain[item, .]: without the weight, f32, if wanted. A block takes tiles in turn.
template <class F>
static __device__ __forceinline__ void gate_up(const Weights& gate, const Weights& up, const Sorted& sorted, const u16* x,
                                               u32 n_used, const float* weights, u32 columns, u32 rows, float limit,
                                               u64 pieces, u32 step_columns, u16* mids, float* plain) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[EXPERT_TOKENS], items[EXPERT_TOKENS];
    __shared__ volatile Tile now;
    u8* memory = stages_in(shared_memory);
    u8* table = memory + Stages<F, THREADS, EXPERT_TOKENS>::ALL_BYTES;
    u32* before = (u32*)(table + F::TABLE_BYTES);
    F::fill(table);
    Pipeline pipeline = pipeline_of_block();
    const u32 row_tiles = (rows + THREADS / 2 - 1) / (THREADS / 2), tiles = count_tiles(sorted.starts, sorted.n_experts, before) * row_tiles;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (threadIdx.x == 0) find_tile(now, sorted, before, index, row_tiles, THREADS / 2);
        __syncthreads();
        if (threadIdx.x < now.count) {
            u32 item = sorted.order[now.place + threadIdx.x];
            items[threadIdx.x] = item;
            rows_of_x[threadIdx.x] = item / n_used;
        }
        __syncthreads();
        Inputs inputs = {x, columns, rows_of_x, now.count};
        float sums[2][8][4];
        const Rows<true> own = {gate, up, now.expert * rows + now.first_row, now.expert * rows + rows - 1};
        tile<F, 2, 8>(sums, own, columns, inputs, memory, table, pipeline);
        const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 row = now.first_row + warp * 16 + i / 2 * 8 + g, column = permuted(row, pieces, step_columns);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    u32 token = n * 8 + t * 2 + j;
                    if (row < rows && token < now.count) {
                        float mid = swiglu(sums[0][n][i + j], sums[1][n][i + j], limit);
                        u32 item = items[token];
                        if (plain) plain[(u64)item * rows + row] = mid;
                        mids[(u64)(now.place + token) * rows + column] = float_to_half(mid * weights[item]);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// parts[item, .] = down(expert of the item) . mids[place, .]. A block takes tiles in turn.
template <class F>
static __device__ __forceinline__ void down(const Weights& matrix, const Sorted& sorted, const u16* mids, u32 columns,
                                            u32 rows, float* parts) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[EXPERT_TOKENS], items[EXPERT_TOKENS];
    __shared__ volatile Tile now;
    u8* memory = stages_in(shared_memory);
    u8* table = memory + Stages<F, THREADS, EXPERT_TOKENS>::ALL_BYTES;
    u32* before = (u32*)(table + F::TABLE_BYTES);
    F::fill(table);
    Pipeline pipeline = pipeline_of_block();
    const u32 row_tiles = (rows + THREADS - 1) / THREADS;
    const u32 tiles = count_tiles(sorted.starts, sorted.n_experts, before) * row_tiles;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (threadIdx.x == 0) find_tile(now, sorted, before, index, row_tiles, THREADS);
        __syncthreads();
        if (threadIdx.x < now.count) {
            items[threadIdx.x] = sorted.order[now.place + threadIdx.x];
            rows_of_x[threadIdx.x] = now.place + threadIdx.x;
        }
        __syncthreads();
        Inputs inputs = {mids, columns, rows_of_x, now.count};
        float sums[2][8][4];
        const Rows<false> own = {matrix, matrix, now.expert * rows + now.first_row, now.expert * rows + rows - 1};
        tile<F, 2, 8>(sums, own, columns, inputs, memory, table, pipeline);
        const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 row = now.first_row + warp * 32 + m * 16 + i / 2 * 8 + g, token = n * 8 + t * 2 + i % 2;
                    if (row < rows && token < now.count) parts[(u64)items[token] * rows + row] = sums[m][n][i];
                }
            }
        }
        __syncthreads();
    }
}

#define DENSE(NAME, F)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_##NAME(                                            \
        const __grid_constant__ Weights matrix, const u16* x, u64 stride, u32 columns, u32 group_rows, u32 tokens,    \
        float* out) {                                                                                                 \
        dense<F>(matrix, x, stride, columns, group_rows, tokens, out);                                                \
    }

#define EXPERTS(NAME, F)                                                                                              \
    DENSE(NAME, F)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_up_##NAME(                                          \
        const __grid_constant__ Weights gate, const __grid_constant__ Weights up,                                     \
        const __grid_constant__ Sorted sorted, const u16* x, u32 n_used, const float* weights, u32 columns, u32 rows, \
        float limit, u64 pieces, u32 step_columns, u16* mids, float* plain) {                                         \
        gate_up<F>(gate, up, sorted, x, n_used, weights, columns, rows, limit, pieces, step_columns, mids, plain);    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) down_##NAME(                                             \
        const __grid_constant__ Weights matrix, const __grid_constant__ Sorted sorted, const u16* mids, u32 columns,  \
        u32 rows, float* parts) {                                                                                     \
        down<F>(matrix, sorted, mids, columns, rows, parts);                                                          \
    }

DENSE(Q8_0, Q8_0)
DENSE(F16, F16)
EXPERTS(IQ2_XXS, Iq2Xxs)
EXPERTS(Q2_K, Q2K)
EXPERTS(Q4_K, Q4K)
EXPERTS(MXFP4, Mxfp4)

// halves[row, .] = values[row, .] as f16, pieces of eight columns in the order that a format wants.
extern "C" __global__ void __launch_bounds__(256) to_halves(const float* values, u64 n, u64 pieces, u32 step_columns,
                                                            u16* halves) {
    u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= n) return;
    float4 a = *(const float4*)(values + i), b = *(const float4*)(values + i + 4);
    u32 within = i % step_columns;
    u32 piece = pieces >> (within / 8 * 4) & 15;
    u16* to = halves + (i - within);
    *(u32*)(to + place_of_pair(piece, 0)) = floats_to_halves(a.x, a.y);
    *(u32*)(to + place_of_pair(piece, 1)) = floats_to_halves(a.z, a.w);
    *(u32*)(to + place_of_pair(piece, 2)) = floats_to_halves(b.x, b.y);
    *(u32*)(to + place_of_pair(piece, 3)) = floats_to_halves(b.z, b.w);
}

// Sorts items by expert, keeping their order within one: starts[n_experts + 1] and order[n]. A block has one expert; it
// counts the items of the experts before its own, so that blocks need not wait for each other.
extern "C" __global__ void __launch_bounds__(256) sort_by_expert(const u32* experts, u32 n, u32 n_experts, u32* starts,
                                                                 u32* order) {
    constexpr u32 warps = 256 / WARP;
    __shared__ u32 before[warps], own[warps];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, expert = blockIdx.x;
    const u32 share = (n + warps - 1) / warps, begin = min(warp * share, n), end = min(begin + share, n);
    u32 less = 0, equal = 0;
    for (u32 i = begin; i < end; i += WARP) {
        u32 id = i + lane < end ? experts[i + lane] : ALL_LANES;
        less += __popc(__ballot_sync(ALL_LANES, id < expert));
        equal += __popc(__ballot_sync(ALL_LANES, id == expert));
    }
    if (lane == 0) {
        before[warp] = less;
        own[warp] = equal;
    }
    __syncthreads();
    u32 start = 0, place = 0, total = 0;
    for (u32 w = 0; w < warps; w++) {
        start += before[w];
        if (w < warp) place += own[w];
        total += own[w];
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert == n_experts - 1) starts[n_experts] = start + total;
    }
    place += start;
    for (u32 i = begin; i < end; i += WARP) {
        bool mine = i + lane < end && experts[i + lane] == expert;
        u32 all = __ballot_sync(ALL_LANES, mine);
        if (mine) order[place + __popc(all & ((1u << lane) - 1))] = i + lane;
        place += __popc(all);
    }
}
