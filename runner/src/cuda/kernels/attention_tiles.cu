// Attention by tensor cores, (4.4.4 to 4.4.6). All heads share the key-value rows, so the heads of one
// token are the rows of a tile, and its keys are taken N at a time. Queries, keys and softmax weights are f16, sums f32.
//
// A block has one token and M heads: M / 16 groups of heads by GROUPS groups of warps that share out first the keys, then
// the channels.

static __device__ __forceinline__ void load_matrices_transposed(u32 (&v)[4], u32 place) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(place));
}

static __device__ __forceinline__ void load_two_matrices(u32 (&v)[2], u32 place) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(place));
}

static __device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

static __device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// Grid: tokens, heads / M. Window ring, compressed rows and choice as in attention.cu.
template <int WIDTH, int M, int N, int STAGES>
static __device__ __forceinline__ void attend_tiles(
    const float* queries, const u16* ring, const u16* rows, const int* chosen, const float* sinks,
    const float* frequencies, const int* positions, float* output, int n_heads, int n_rotary, int kind, int ring_mask,
    int window, int ratio, int top_k, float scale) {
    constexpr int GROUPS = 8 / (M / 16), PITCH = WIDTH + 8, OWN_KEYS = N / GROUPS, OWN = WIDTH / GROUPS;
    constexpr int KEY_BYTES = N * PITCH * 2;
    extern __shared__ uint4 memory[];
    u16* q = (u16*)memory;
    u16* keys = q + M * PITCH;
    float* scores = (float*)(keys + STAGES * N * PITCH);
    const int token = blockIdx.x, first_head = blockIdx.y * M, position = positions[token];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp / (M / 16), heads = warp % (M / 16) * 16;
    const int matrix = lane >> 3, in_matrix = lane & 7, row_of = lane >> 2, column_of = (lane & 3) * 2;

    const int n_visible = kind == 0 ? 0 : (position + 1) / ratio;
    const bool by_choice = kind == 2 && n_visible > top_k;
    const int* choice = chosen + (u64)token * top_k;
    const int first = max(position + 1 - window, 0), n_window = position + 1 - first;
    const int n_keys = n_window + (by_choice ? top_k : n_visible), n_tiles = (n_keys + N - 1) / N;

    auto load = [&](int tile) {
        u32 to = shared_address(keys) + tile % STAGES * KEY_BYTES;
#pragma unroll 4
        for (int c = threadIdx.x; c < N * (WIDTH / 8); c += 256) {
            int key = c / (WIDTH / 8), chunk = c % (WIDTH / 8), i = min(tile * N + key, n_keys - 1), w = i - n_window;
            const u16* row = i < n_window ? ring + (u64)((first + i) & ring_mask) * WIDTH
                                          : rows + (u64)(by_choice ? choice[w] : w) * WIDTH;
            copy_async(to + (key * PITCH + chunk * 8) * 2, row + chunk * 8);
        }
    };
    load(0);
    copies_commit();
    for (int c = threadIdx.x; c < M * (WIDTH / 4); c += 256) {
        int head = c / (WIDTH / 4), chunk = c % (WIDTH / 4);
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first_head + head < n_heads)
            v = *(const float4*)(queries + ((u64)token * n_heads + first_head + head) * WIDTH + chunk * 4);
        *(uint2*)(q + head * PITCH + chunk * 4) = make_uint2(floats_to_halves(v.x, v.y), floats_to_halves(v.z, v.w));
    }

    float sums[OWN / 8][4], largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < OWN / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    const u32 q_place = shared_address(q) + ((heads + (matrix & 1) * 8 + in_matrix) * PITCH + (matrix >> 1) * 8) * 2;

    for (int tile = 0; tile < n_tiles; tile++) {
        if (STAGES == 2) {
            if (tile + 1 < n_tiles) load(tile + 1);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const u32 here = shared_address(keys) + tile % STAGES * KEY_BYTES;

        float s[OWN_KEYS / 8][4];
#pragma unroll
        for (int i = 0; i < OWN_KEYS / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = 0.0f;
        if (OWN_KEYS == 16) {
            u32 place = here + ((part * 16 + (matrix >> 1) * 8 + in_matrix) * PITCH + (matrix & 1) * 8) * 2;
#pragma unroll 4
            for (int k = 0; k < WIDTH / 16; k++) {
                u32 a[4], b[4];
                load_matrices(a, q_place + k * 32);
                load_matrices(b, place + k * 32);
                multiply_tile(s[0], a, b[0], b[1]);
                multiply_tile(s[OWN_KEYS / 8 - 1], a, b[2], b[3]);
            }
        } else {
            u32 place = here + ((part * 8 + in_matrix) * PITCH + (matrix & 1) * 8) * 2;
#pragma unroll 4
            for (int k = 0; k < WIDTH / 16; k++) {
                u32 a[4], b[2];
                load_matrices(a, q_place + k * 32);
                load_two_matrices(b, place + k * 32);
                multiply_tile(s[0], a, b[0], b[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < OWN_KEYS / 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = part * OWN_KEYS + i * 8 + column_of + (j & 1), head = heads + row_of + (j >> 1) * 8;
                scores[head * (N + 1) + key] = tile * N + key < n_keys ? s[i][j] * scale : NEGATIVE_INFINITY;
            }
        }
        __syncthreads();

        // Every group of a head's warps works out all its weights.
        float p[2][N / 4], now[2] = {largest[0], largest[1]};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = NEGATIVE_INFINITY;
#pragma unroll
            for (int i = 0; i < N / 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    p[r][2 * i + j] = scores[(heads + row_of + r * 8) * (N + 1) + i * 8 + column_of + j];
                    most = fmaxf(most, p[r][2 * i + j]);
                }
            now[r] = fmaxf(now[r], quad_max(most));
        }
        float keep[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            keep[r] = __expf(largest[r] - now[r]);
            largest[r] = now[r];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                p[r][i] = __expf(p[r][i] - now[r]);
                sum += p[r][i];
            }
            total[r] = fmaf(total[r], keep[r], sum);
        }
        if (__any_sync(ALL_LANES, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < OWN / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] *= keep[j >> 1];
        }
        u32 place = here + (((matrix & 1) * 8 + in_matrix) * PITCH + part * OWN + (matrix >> 1) * 8) * 2;
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
            u32 a[4];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    a[2 * half + r] = floats_to_halves(p[r][4 * k + 2 * half], p[r][4 * k + 2 * half + 1]);
#pragma unroll
            for (int i = 0; i < OWN / 16; i++) {
                u32 b[4];
                load_matrices_transposed(b, place + (k * 16 * PITCH + i * 16) * 2);
                multiply_tile(sums[2 * i], a, b[0], b[1]);
                multiply_tile(sums[2 * i + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
        if (STAGES == 1 && tile + 1 < n_tiles) {
            load(tile + 1);
            copies_commit();
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        int head = first_head + heads + row_of + r * 8;
        float sum = quad_sum(total[r]);
        if (head >= n_heads) continue;
        float sink = sinks[head], most = fmaxf(largest[r], sink), keep = expf(largest[r] - most);
        float factor = keep / fmaf(sum, keep, expf(sink - most));
        float* out = output + ((u64)token * n_heads + head) * WIDTH;
#pragma unroll
        for (int i = 0; i < OWN / 8; i++) {
            int channel = part * OWN + i * 8 + column_of, rotary = channel - (WIDTH - 2 * n_rotary);
            float2 pair = {sums[i][2 * r] * factor, sums[i][2 * r + 1] * factor};
            if (rotary >= 0) {
                float2 angle = rotary_angle(position, frequencies[rotary / 2]);
                angle.y = -angle.y;
                pair = rotate(pair, angle);
            }
            *(float2*)(out + channel) = pair;
        }
    }
}

#define ATTEND_TILES(NAME, WIDTH, M, STAGES)                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 1) attend_tiles_##NAME(                                           \
        const float* queries, const u16* ring, const u16* rows, const int* chosen, const float* sinks,                  \
        const float* frequencies, const int* positions, float* output, int n_heads, int n_rotary, int kind,             \
        int ring_mask, int window, int ratio, int top_k, float scale) {                                                 \
        await_previous();                                                                                               \
        attend_tiles<WIDTH, M, 32, STAGES>(queries, ring, rows, chosen, sinks, frequencies, positions, output, n_heads, \
                                           n_rotary, kind, ring_mask, window, ratio, top_k, scale);                     \
    }

ATTEND_TILES(64, 64, 64, 2)
ATTEND_TILES(128, 128, 64, 2)
ATTEND_TILES(256, 256, 64, 2)
ATTEND_TILES(512, 512, 64, 2)
// For devices with 100 KB of shared memory.
ATTEND_TILES(512_small, 512, 32, 1)

// The same for few tokens: a block has 16 heads and the 32 keys of one part, which join_parts of attention.cu joins. Its 8
// warps share out the channels, of scores and of outputs alike.
// Grid: tokens, heads / 16, parts. parts: [T, heads, n_parts, 4 + WIDTH], largest score and sum first.
template <int WIDTH>
static __device__ __forceinline__ void attend_parts(
    const float* queries, const u16* ring, const u16* rows, const int* chosen, const int* positions, float* parts,
    int n_heads, int kind, int ring_mask, int window, int ratio, int top_k, int n_parts, float scale) {
    constexpr int N = 32, PITCH = WIDTH + 8, OWN = WIDTH / 8;
    extern __shared__ uint4 memory[];
    u16* keys = (u16*)memory;
    u16* q = keys + N * PITCH;
    // Scores of each warp's channels, [8][16][N + 4].
    float* scores = (float*)(q + 16 * PITCH);
    constexpr int SCORE_PITCH = N + 4;
    const int token = blockIdx.x, first_head = blockIdx.y * 16, position = positions[token];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int matrix = lane >> 3, in_matrix = lane & 7, row_of = lane >> 2, column_of = (lane & 3) * 2;
    const int n_visible = kind == 0 ? 0 : (position + 1) / ratio;
    const bool by_choice = kind == 2 && n_visible > top_k;
    const int* choice = chosen + (u64)token * top_k;
    const int first = max(position + 1 - window, 0), n_window = position + 1 - first;
    const int n_keys = n_window + (by_choice ? top_k : n_visible), first_key = blockIdx.z * N;
    if (first_key >= n_keys) return;

    for (int c = threadIdx.x; c < N * (WIDTH / 8); c += 256) {
        int key = c / (WIDTH / 8), chunk = c % (WIDTH / 8), i = min(first_key + key, n_keys - 1), w = i - n_window;
        const u16* row = i < n_window ? ring + (u64)((first + i) & ring_mask) * WIDTH
                                      : rows + (u64)(by_choice ? choice[w] : w) * WIDTH;
        copy_async(shared_address(keys + key * PITCH + chunk * 8), row + chunk * 8);
    }
    copies_commit();
    for (int c = threadIdx.x; c < 16 * (WIDTH / 4); c += 256) {
        int head = c / (WIDTH / 4), chunk = c % (WIDTH / 4);
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first_head + head < n_heads)
            v = *(const float4*)(queries + ((u64)token * n_heads + first_head + head) * WIDTH + chunk * 4);
        *(uint2*)(q + head * PITCH + chunk * 4) = make_uint2(floats_to_halves(v.x, v.y), floats_to_halves(v.z, v.w));
    }
    copies_wait<0>();
    __syncthreads();

    // With 64 channels only four warps have a step of 16 of their own.
    float s[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[i][j] = 0.0f;
#pragma unroll
    for (int k = warp * 16; k < WIDTH; k += 128) {
        u32 a[4];
        load_matrices(a, shared_address(q + ((matrix & 1) * 8 + in_matrix) * PITCH + k + (matrix >> 1) * 8));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 b[4];
            int key = half * 16 + (matrix >> 1) * 8 + in_matrix;
            load_matrices(b, shared_address(keys + key * PITCH + k + (matrix & 1) * 8));
            multiply_tile(s[2 * half], a, b[0], b[1]);
            multiply_tile(s[2 * half + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2*)(scores + (warp * 16 + row_of + 8 * r) * SCORE_PITCH + i * 8 + column_of) =
                make_float2(s[i][2 * r], s[i][2 * r + 1]);
    __syncthreads();

    float p[2][8], largest[2], total[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        largest[r] = NEGATIVE_INFINITY;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < 8; w++) {
                float2 part = *(const float2*)(scores + (w * 16 + row_of + 8 * r) * SCORE_PITCH + i * 8 + column_of);
                sum.x += part.x;
                sum.y += part.y;
            }
            int key = first_key + i * 8 + column_of;
            p[r][2 * i] = key < n_keys ? sum.x * scale : NEGATIVE_INFINITY;
            p[r][2 * i + 1] = key + 1 < n_keys ? sum.y * scale : NEGATIVE_INFINITY;
            largest[r] = fmaxf(largest[r], fmaxf(p[r][2 * i], p[r][2 * i + 1]));
        }
        largest[r] = quad_max(largest[r]);
        total[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            p[r][i] = __expf(p[r][i] - largest[r]);
            total[r] += p[r][i];
        }
        total[r] = quad_sum(total[r]);
    }
    float sums[(OWN + 7) / 8][4];
#pragma unroll
    for (int i = 0; i < (OWN + 7) / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        u32 a[4];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                a[2 * half + r] = floats_to_halves(p[r][4 * k + 2 * half], p[r][4 * k + 2 * half + 1]);
        const u16* from = keys + (k * 16 + (matrix & 1) * 8 + in_matrix) * PITCH + warp * OWN;
#pragma unroll
        for (int i = 0; i < OWN / 8; i += 2) {
            u32 b[4];
            // The second eight channels of a warp that has but eight are those of the first.
            load_matrices_transposed(b, shared_address(from + i * 8 + (OWN > 8 ? (matrix >> 1) * 8 : 0)));
            multiply_tile(sums[i], a, b[0], b[1]);
            if (OWN > 8) multiply_tile(sums[min(i + 1, OWN / 8 - 1)], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int head = first_head + row_of + r * 8;
        if (head >= n_heads) continue;
        float* out = parts + (((u64)token * n_heads + head) * n_parts + blockIdx.z) * (4 + WIDTH);
        if (warp == 0 && (lane & 3) == 0) *(float2*)out = make_float2(largest[r], total[r]);
#pragma unroll
        for (int i = 0; i < OWN / 8; i++)
            *(float2*)(out + 4 + warp * OWN + i * 8 + column_of) = make_float2(sums[i][2 * r], sums[i][2 * r + 1]);
    }
}

#define ATTEND_PARTS(WIDTH)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) attend_parts_##WIDTH(                                             \
        const float* queries, const u16* ring, const u16* rows, const int* chosen, const int* positions, float* parts,  \
        int n_heads, int kind, int ring_mask, int window, int ratio, int top_k, int n_parts, float scale) {             \
        await_previous();                                                                                               \
        attend_parts<WIDTH>(queries, ring, rows, chosen, positions, parts, n_heads, kind, ring_mask, window, ratio,     \
                            top_k, n_parts, scale);                                                                     \
    }

ATTEND_PARTS(64)
ATTEND_PARTS(128)
ATTEND_PARTS(256)
ATTEND_PARTS(512)
