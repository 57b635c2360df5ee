// Products with few inputs, near the memory's speed: Q8_0 and F16 weights in planes, inputs f32.
// A warp has R rows of a matrix and walks along them in steps of C times 512 bytes a row; the next step is loaded
// while one is computed. The inputs lie in shared memory. A row's sum has one order, whatever R and C are.

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
    u32 unused;
};

// Place of the float4 `index` of an input: lanes that read at strides of two or four get banks of their own.
static __device__ __forceinline__ u32 swizzled(u32 index) { return index ^ (index >> 3 & 7); }

// Bytes as floats, exactly: 2^23 + the byte in offset binary, less 2^23 + 128.
static __device__ __forceinline__ float byte_to_float(u32 offset_bytes, u32 selector) {
    return __uint_as_float(__byte_perm(offset_bytes, 0x4B000000u, selector)) - 8388736.0f;
}

template <int R, int C> struct Step {
    uint4 weights[R][C];
    u16 scales[R][C];
};

// inputs: [TOKENS, stride] f32; group `blockIdx.y` of the input's columns and the rows.
template <int TOKENS, int R, int C>
static __device__ __forceinline__ void products(const Parts& parts, const float* input, u64 stride, u32 columns,
                                                u32 group_rows, u32 tokens) {
    extern __shared__ float4 shared_input[];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quads = columns / 4, pitch = (quads + 7) / 8 * 8;
    const u32 items = parts.part[parts.n - 1].end, first_row = blockIdx.y * group_rows;
    const u32 item_step = gridDim.x * (blockDim.x / WARP);

    const u8* row_weights = nullptr;
    const u16* row_scales = nullptr;
    u32 row_bytes = 0, part = 0, row = 0, rows_left = 0;
    auto begin = [&](u32 item) {
        part = 0;
        while (item >= parts.part[part].end) part++;
        const Part& p = parts.part[part];
        u32 before = part ? parts.part[part - 1].end : 0;
        row = (item - before) * R;
        rows_left = min((u32)R, (parts.n == 1 ? group_rows : p.rows) - row);
        row += first_row;
        row_bytes = p.scales ? columns : 2 * columns;
        row_weights = p.weights + (u64)row * row_bytes;
        row_scales = p.scales ? p.scales + (u64)row * (columns / 32) : nullptr;
    };
    auto load = [&](Step<R, C>& step, u32 index) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            u32 at = (index * C + c) * 512 + lane * 16;
            bool inside = at < row_bytes;
#pragma unroll
            for (int r = 0; r < R; r++) {
                // A row beyond the last is the last one again: loaded, computed and dropped.
                u32 own = min((u32)r, rows_left - 1);
                step.weights[r][c] = inside ? load_once((const uint4*)(row_weights + (u64)own * row_bytes + at))
                                            : make_uint4(0, 0, 0, 0);
                step.scales[r][c] =
                    inside && row_scales ? load_once(row_scales + own * (columns / 32) + at / 32) : (u16)0;
            }
        }
    };

    // Blocks take turns, so that few items spread over all multiprocessors.
    u32 item = warp * gridDim.x + blockIdx.x;
    Step<R, C> now, next;
    if (item < items) {
        begin(item);
        load(now, 0);
    }
    await_previous();
    for (u32 i = threadIdx.x; i < TOKENS * quads; i += blockDim.x) {
        u32 token = i / quads, quad = i % quads;
        const float4* from = (const float4*)(input + min(token, tokens - 1) * stride + (u64)blockIdx.y * columns);
        shared_input[token * pitch + swizzled(quad)] = from[quad];
    }
    __syncthreads();

    while (item < items) {
        const u32 steps = (row_bytes + C * 512 - 1) / (C * 512), this_row = row, this_rows = rows_left, this_part = part;
        const bool bytes = row_scales != nullptr;
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
                begin(item + item_step);
                load(next, 0);
            }
#pragma unroll
            for (int c = 0; c < C; c++) {
                u32 at = (index * C + c) * 512 + lane * 16;
                if (bytes) {
                    u32 quad = min(at / 4, quads - 4);
                    float chunk[R][TOKENS];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float w[R][4];
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            uint4 v = now.weights[r][c];
                            u32 word = (j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w) ^ 0x80808080u;
                            w[r][0] = byte_to_float(word, 0x7440);
                            w[r][1] = byte_to_float(word, 0x7441);
                            w[r][2] = byte_to_float(word, 0x7442);
                            w[r][3] = byte_to_float(word, 0x7443);
                        }
#pragma unroll
                        for (int t = 0; t < TOKENS; t++) {
                            float4 x = shared_input[t * pitch + swizzled(quad + j)];
#pragma unroll
                            for (int r = 0; r < R; r++) {
                                float sum = j == 0 ? w[r][0] * x.x : fmaf(w[r][0], x.x, chunk[r][t]);
                                sum = fmaf(w[r][1], x.y, sum);
                                sum = fmaf(w[r][2], x.z, sum);
                                chunk[r][t] = fmaf(w[r][3], x.w, sum);
                            }
                        }
                    }
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        float d = half_to_float(now.scales[r][c]);
#pragma unroll
                        for (int t = 0; t < TOKENS; t++) sums[r][t] = fmaf(d, chunk[r][t], sums[r][t]);
                    }
                } else {
                    u32 quad = min(at / 8, quads - 2);
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float w[R][4];
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            uint4 v = now.weights[r][c];
                            u32 first = j == 0 ? v.x : v.z, second = j == 0 ? v.y : v.w;
                            w[r][0] = half_to_float((u16)first);
                            w[r][1] = half_to_float((u16)(first >> 16));
                            w[r][2] = half_to_float((u16)second);
                            w[r][3] = half_to_float((u16)(second >> 16));
                        }
#pragma unroll
                        for (int t = 0; t < TOKENS; t++) {
                            float4 x = shared_input[t * pitch + swizzled(quad + j)];
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
            }
            now = next;
        }
        const Part& p = parts.part[this_part];
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float sum = warp_sum(sums[r][t]);
                if (lane == 0 && r < this_rows && t < tokens) p.out[(u64)t * p.rows + this_row + r] = sum;
            }
        }
        item += item_step;
    }
}

#define PRODUCTS(TOKENS, R, C, BLOCKS)                                                                             \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) products_##TOKENS##_##R(                             \
        const __grid_constant__ Parts parts, const float* input, u64 stride, u32 columns, u32 group_rows,          \
        u32 tokens) {                                                                                              \
        products<TOKENS, R, C>(parts, input, stride, columns, group_rows, tokens);                                 \
    }

PRODUCTS(1, 1, 4, 3)
PRODUCTS(1, 2, 4, 2)
PRODUCTS(1, 4, 2, 2)
PRODUCTS(2, 2, 2, 2)
PRODUCTS(4, 2, 2, 2)
#if __CUDA_ARCH__ >= 1000
PRODUCTS(8, 2, 2, 1)
#else
PRODUCTS(8, 2, 2, 2)
#endif
