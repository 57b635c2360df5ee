// What kernels on activations share, behind common.cuh. They are compiled without contraction: products and sums become
// one operation only where fmaf is written, so that equal inputs give equal bits in every kernel.

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

static __device__ __forceinline__ void store(u16* to, float value) { *to = float_to_half(value); }
static __device__ __forceinline__ void store(float* to, float value) { *to = value; }
static __device__ __forceinline__ float load(const u16* from) { return half_to_float(*from); }
static __device__ __forceinline__ float load(const float* from) { return *from; }

// Order of floats as order of integers.
static __device__ __forceinline__ u32 sort_key(float x) {
    u32 bits = __float_as_uint(x);
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, offset));
    return value;
}

// Every thread gets the sum over the block. `scratch`: 32 values of shared memory.
static __device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
    __syncthreads();
    float sum = 0.0f;
    for (int warp = 0; warp < (int)(blockDim.x >> 5); warp++) sum += scratch[warp];
    return sum;
}

// Cosine and sine of the angle of a rotary pair.
static __device__ __forceinline__ float2 rotary_angle(int position, float frequency) {
    float2 angle;
    sincosf((float)position * frequency, &angle.y, &angle.x);
    return angle;
}

static __device__ __forceinline__ float2 rotate(float2 pair, float2 angle) {
    float2 turned;
    turned.x = pair.x * angle.x - pair.y * angle.y;
    turned.y = pair.x * angle.y + pair.y * angle.x;
    return turned;
}

// 2^ceil(log2(x)) of a positive normal number, from its bits.
static __device__ __forceinline__ float power_of_two_above(float x) {
    u32 bits = __float_as_uint(x);
    return __uint_as_float(((bits >> 23) + ((bits & 0x007fffffu) ? 1u : 0u)) << 23);
}

// Nearest FP8 E4M3 value times the scale, ties to even. `largest`: of the group of 64.
static __device__ __forceinline__ float round_to_fp8(float value, float largest) {
    float scale = power_of_two_above(fmaxf(largest, 1e-4f) / 448.0f);
    float x = fminf(fmaxf(value / scale, -448.0f), 448.0f);
    int exponent = max((int)(__float_as_uint(fabsf(x)) >> 23) - 127, -6);
    float step = __uint_as_float((u32)(exponent - 3 + 127) << 23);
    return rintf(x / step) * step * scale;
}

// Nearest FP4 E2M1 value times the scale, ties to even. `largest`: of the group of 32.
static __device__ __forceinline__ float round_to_fp4(float value, float largest) {
    float scale = power_of_two_above(fmaxf(largest, 6.0f * 1.17549435e-38f) / 6.0f);
    float x = fminf(fmaxf(value / scale, -6.0f), 6.0f);
    float size = fabsf(x);
    float step = size < 2.0f ? 0.5f : size < 4.0f ? 1.0f : 2.0f;
    return rintf(x / step) * step * scale;
}

// Walsh-Hadamard rotation of 32 * N values, N consecutive ones a lane, then FP4 rounding in groups of 32.
template <int N>
static __device__ __forceinline__ void rotate_and_round_to_fp4(float (&v)[N], int lane, float factor) {
#pragma unroll
    for (int half = 1; half < N; half *= 2)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & half)) {
                float a = v[i], b = v[i + half];
                v[i] = a + b;
                v[i + half] = a - b;
            }
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float other = __shfl_xor_sync(ALL_LANES, v[i], apart);
            v[i] = (lane & apart) ? other - v[i] : v[i] + other;
        }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] *= factor;
        largest = fmaxf(largest, fabsf(v[i]));
    }
    // A group of 32 values lies in 32 / N lanes.
#pragma unroll
    for (int apart = 1; apart < 32 / N; apart *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, apart));
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = round_to_fp4(v[i], largest);
}

// Rounds the first `plain` values of a row in groups of 64, a warp a group.
static __device__ __forceinline__ void round_row_to_fp8(float* row, int plain) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int start = 64 * warp; start < plain; start += 2 * blockDim.x) {
        int a = start + lane, b = a + 32;
        float x = a < plain ? row[a] : 0.0f, y = b < plain ? row[b] : 0.0f;
        float largest = warp_max(fmaxf(fabsf(x), fabsf(y)));
        if (a < plain) row[a] = round_to_fp8(x, largest);
        if (b < plain) row[b] = round_to_fp8(y, largest);
    }
}

template <typename Angle>
static __device__ __forceinline__ void rotate_row(float* row, int width, const Angle& angle, int n_rotary) {
    float2* pairs = (float2*)(row + width - 2 * n_rotary);
    for (int i = threadIdx.x; i < n_rotary; i += blockDim.x) pairs[i] = rotate(pairs[i], angle(i));
}

static __device__ __forceinline__ void rotate_row(float* row, int width, const float* frequencies, int n_rotary, int position) {
    rotate_row(row, width, [&](int i) { return rotary_angle(position, frequencies[i]); }, n_rotary);
}

// Hadamard rotation and FP4 rounding of a row in shared memory, by one warp.
template <int N>
static __device__ __forceinline__ void rotate_and_round_row(float* row, float factor) {
    float v[N];
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = row[lane * N + i];
    rotate_and_round_to_fp4(v, lane, factor);
#pragma unroll
    for (int i = 0; i < N; i++) row[lane * N + i] = v[i];
}

// Pairs of a lane that are on their way together.
#define PAIRS_AT_ONCE 8

// (4.4.2) Unweighted norm and rotation of a head, by one warp. `angle(i)`: that of rotary pair i.
template <typename Angle>
static __device__ __forceinline__ void finish_query(float* query, const Angle& angle, int head_dim, int n_rotary, float epsilon) {
    float2* head = (float2*)query;
    int lane = threadIdx.x & 31, n_pairs = head_dim / 2, plain = n_pairs - n_rotary;
    float sum = 0.0f;
    float2 early[PAIRS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < PAIRS_AT_ONCE; k++)
        if (lane + 32 * k < n_pairs) early[k] = head[lane + 32 * k];
#pragma unroll
    for (int k = 0; k < PAIRS_AT_ONCE; k++)
        if (lane + 32 * k < n_pairs) sum = fmaf(early[k].x, early[k].x, fmaf(early[k].y, early[k].y, sum));
    for (int i = lane + 32 * PAIRS_AT_ONCE; i < n_pairs; i += 32) sum = fmaf(head[i].x, head[i].x, fmaf(head[i].y, head[i].y, sum));
    float factor = inverse_rms(warp_sum(sum), head_dim, epsilon);
    auto finish = [&](int i, float2 pair) {
        pair.x *= factor;
        pair.y *= factor;
        if (i >= plain) pair = rotate(pair, angle(i - plain));
        head[i] = pair;
    };
#pragma unroll
    for (int k = 0; k < PAIRS_AT_ONCE; k++)
        if (lane + 32 * k < n_pairs) finish(lane + 32 * k, early[k]);
    for (int i = lane + 32 * PAIRS_AT_ONCE; i < n_pairs; i += 32) finish(i, head[i]);
}

static __device__ __forceinline__ void finish_query(
    float* query, const float* frequencies, int position, int head_dim, int n_rotary, float epsilon) {
    finish_query(query, [&](int i) { return rotary_angle(position, frequencies[i]); }, head_dim, n_rotary, epsilon);
}

// (4.6.1) Rotation of a head, then Hadamard rotation and rounding, by one warp, N values a lane.
template <int N, typename Angle>
static __device__ __forceinline__ void finish_index_query(
    float* query, const Angle& angle, int n_rotary, int official, float hadamard_factor) {
    int lane = threadIdx.x & 31;
    float v[N], *head = query + lane * N;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        float2 pair = *(const float2*)(head + i);
        int rotary = lane * N + i - (32 * N - 2 * n_rotary);
        if (rotary >= 0) pair = rotate(pair, angle(rotary / 2));
        v[i] = pair.x;
        v[i + 1] = pair.y;
    }
    if (official) rotate_and_round_to_fp4(v, lane, hadamard_factor);
#pragma unroll
    for (int i = 0; i < N; i++) head[i] = v[i];
}

template <int N>
static __device__ __forceinline__ void finish_index_query(
    float* query, const float* frequencies, int position, int n_rotary, int official, float hadamard_factor) {
    finish_index_query<N>(query, [&](int i) { return rotary_angle(position, frequencies[i]); }, n_rotary, official, hadamard_factor);
}

// A fragment of 16 x 16 or two of 16 x 8 from four 8 x 8 matrices; `place`: a row of one of them for each lane.
static __device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 place) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(place));
}
