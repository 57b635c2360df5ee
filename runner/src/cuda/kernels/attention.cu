// Rotation and attention over window and compressed rows, (4.4).
//
// The window is a ring: the row of position p is in slot p & ring_mask. All heads share the key-value rows, which are
// keys and values at once. Storage S: u16 (halves) or float.

// One warp a head of a token.
extern "C" __global__ void q_finish(
    float* queries, const float* frequencies, const int* positions,
    int n_tokens, int n_heads, int head_dim, int n_rotary, float epsilon) {
    await_previous();
    u32 job = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (job >= (u32)n_tokens * n_heads) return;
    finish_query(queries + (u64)job * head_dim, frequencies, positions[job / n_heads], head_dim, n_rotary, epsilon);
}

// (4.4.3) Rotation, then rounding. One block a row.
extern "C" __global__ void kv_finish(
    float* rows, const float* frequencies, const int* positions, int width, int n_rotary, int official) {
    await_previous();
    float* row = rows + (u64)blockIdx.x * width;
    rotate_row(row, width, frequencies, n_rotary, positions[blockIdx.x]);
    if (official) round_row_to_fp8(row, width - 2 * n_rotary);
}

template <typename S>
static __device__ __forceinline__ void append_window(
    const float* rows, S* ring, const int* positions, int width, int ring_mask) {
    S* slot = ring + (u64)(positions[blockIdx.x] & ring_mask) * width;
    const float* row = rows + (u64)blockIdx.x * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) store(slot + i, row[i]);
}

extern "C" __global__ void append_window_half(const float* rows, u16* ring, const int* positions, int width, int ring_mask) {
    await_previous();
    append_window(rows, ring, positions, width, ring_mask);
}

extern "C" __global__ void append_window_float(const float* rows, float* ring, const int* positions, int width, int ring_mask) {
    await_previous();
    append_window(rows, ring, positions, width, ring_mask);
}

// N consecutive values.
template <int N>
static __device__ __forceinline__ void load_values(const float* from, float* v) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        float2 pair = *(const float2*)(from + i);
        v[i] = pair.x;
        v[i + 1] = pair.y;
    }
}

// What attention reads, and of which kind the compressed rows are.
enum { NO_ROWS = 0, VISIBLE_ROWS = 1, CHOSEN_ROWS = 2 };

template <typename S>
struct Keys {
    const S* ring;
    const S* rows;
    const int* chosen;
    int ring_mask, first, n_window, n_keys;

    __device__ __forceinline__ const S* at(int i, int width) const {
        if (i < n_window) return ring + (u64)((first + i) & ring_mask) * width;
        int w = i - n_window;
        return rows + (u64)(chosen ? chosen[w] : w) * width;
    }
};

// A softmax under way: largest score, sum of weights, weighted sum of rows (V values a lane).
template <int V>
struct Part {
    float largest, sum, values[V];

    __device__ __forceinline__ void clear() {
        largest = NEGATIVE_INFINITY;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < V; i++) values[i] = 0.0f;
    }

    // Adds a part that comes behind this one.
    __device__ __forceinline__ void join(const Part& other) {
        float now = fmaxf(largest, other.largest);
        float a = largest == NEGATIVE_INFINITY ? 0.0f : expf(largest - now), b = expf(other.largest - now);
        sum = fmaf(sum, a, other.sum * b);
#pragma unroll
        for (int i = 0; i < V; i++) values[i] = fmaf(values[i], a, other.values[i] * b);
        largest = now;
    }
};

// Values of lane l: chunk c, value j is channel (32 c + l) * CHUNK + j.
template <int V> struct Chunks { static const int SIZE = V < 8 ? V : 8, N = V / SIZE; };

// Keys that are taken together.
#define KEYS_AT_ONCE 4
// Keys of a part: parts are computed alone, and joined in order.
#define KEYS_PER_PART 28
// Values before those of a part's channels: its largest score and its sum.
#define PART_HEADER 4

template <typename S, int V>
static __device__ __forceinline__ void attend_part(
    Part<V>& part, const float (&q)[V], const Keys<S>& keys, int first, int lane, float scale) {
    const int SIZE = Chunks<V>::SIZE;
    part.clear();
    int end = min(first + KEYS_PER_PART, keys.n_keys);
    for (int i = first; i < end; i += KEYS_AT_ONCE) {
        float k[KEYS_AT_ONCE][V], score[KEYS_AT_ONCE];
#pragma unroll
        for (int r = 0; r < KEYS_AT_ONCE; r++) {
            const S* row = keys.at(min(i + r, end - 1), 32 * V);
#pragma unroll
            for (int c = 0; c < Chunks<V>::N; c++) load_values<SIZE>(row + (32 * c + lane) * SIZE, k[r] + c * SIZE);
        }
#pragma unroll
        for (int r = 0; r < KEYS_AT_ONCE; r++) {
            score[r] = 0.0f;
#pragma unroll
            for (int j = 0; j < V; j++) score[r] = fmaf(q[j], k[r][j], score[r]);
        }
        float now = part.largest;
#pragma unroll
        for (int r = 0; r < KEYS_AT_ONCE; r++) {
            score[r] = i + r < end ? warp_sum(score[r]) * scale : NEGATIVE_INFINITY;
            now = fmaxf(now, score[r]);
        }
        float keep = part.largest == NEGATIVE_INFINITY ? 0.0f : expf(part.largest - now);
        part.largest = now;
        part.sum *= keep;
#pragma unroll
        for (int j = 0; j < V; j++) part.values[j] *= keep;
#pragma unroll
        for (int r = 0; r < KEYS_AT_ONCE; r++) {
            float weight = expf(score[r] - now);
            part.sum += weight;
#pragma unroll
            for (int j = 0; j < V; j++) part.values[j] = fmaf(weight, k[r][j], part.values[j]);
        }
    }
}

// (4.4.5, 4.4.6) The sink enters the denominator; inverse rotation; the lane's values are written.
template <int V>
static __device__ __forceinline__ void finish_head(
    Part<V>& all, float sink, float* out, int lane, const float* frequencies, int n_rotary, int position) {
    const int SIZE = Chunks<V>::SIZE;
    float largest = fmaxf(all.largest, sink);
    float keep = expf(all.largest - largest);
    float factor = keep / fmaf(all.sum, keep, expf(sink - largest));
#pragma unroll
    for (int c = 0; c < Chunks<V>::N; c++)
#pragma unroll
        for (int j = 0; j < SIZE; j += 2) {
            int channel = (32 * c + lane) * SIZE + j, rotary = channel - (32 * V - 2 * n_rotary);
            float2 pair = {all.values[c * SIZE + j] * factor, all.values[c * SIZE + j + 1] * factor};
            if (rotary >= 0) {
                float2 angle = rotary_angle(position, frequencies[rotary / 2]);
                angle.y = -angle.y;
                pair = rotate(pair, angle);
            }
            *(float2*)(out + channel) = pair;
        }
}

template <typename S>
static __device__ __forceinline__ Keys<S> keys_of(
    const S* ring, const S* rows, const int* chosen, int kind, int position, int token,
    int ring_mask, int window, int ratio, int top_k) {
    Keys<S> keys;
    int n_visible = kind == NO_ROWS ? 0 : (position + 1) / ratio;
    bool by_choice = kind == CHOSEN_ROWS && n_visible > top_k;
    keys.ring = ring;
    keys.rows = rows;
    keys.chosen = by_choice ? chosen + (u64)token * top_k : 0;
    keys.ring_mask = ring_mask;
    keys.first = max(position + 1 - window, 0);
    keys.n_window = position + 1 - keys.first;
    keys.n_keys = keys.n_window + (by_choice ? top_k : n_visible);
    return keys;
}

// Grid: tokens, heads by the warps of a block, and parts if they are kept apart. queries, output: [T, heads * 32 V].
// parts: [T, heads, n_parts, PART_HEADER + 32 V] if not null; otherwise the warp goes through all parts itself.
template <typename S, int V>
static __device__ __forceinline__ void attend(
    const float* queries, const S* ring, const S* rows, const int* chosen, const float* sinks, const float* frequencies,
    const int* positions, float* output, float* parts, int n_heads, int n_rotary, int kind, int ring_mask, int window,
    int ratio, int top_k, int n_parts, float scale) {
    const int SIZE = Chunks<V>::SIZE;
    int token = blockIdx.x, lane = threadIdx.x & 31, head = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (head >= n_heads) return;
    int position = positions[token];
    Keys<S> keys = keys_of(ring, rows, chosen, kind, position, token, ring_mask, window, ratio, top_k);
    if (parts && (int)blockIdx.z * KEYS_PER_PART >= keys.n_keys) return;
    u64 job = (u64)token * n_heads + head;
    float q[V];
#pragma unroll
    for (int c = 0; c < Chunks<V>::N; c++) load_values<SIZE>(queries + job * 32 * V + (32 * c + lane) * SIZE, q + c * SIZE);
    Part<V> part;
    if (parts) {
        attend_part(part, q, keys, blockIdx.z * KEYS_PER_PART, lane, scale);
        float* out = parts + (job * n_parts + blockIdx.z) * (PART_HEADER + 32 * V);
        if (lane == 0) *(float2*)out = make_float2(part.largest, part.sum);
#pragma unroll
        for (int c = 0; c < Chunks<V>::N; c++)
#pragma unroll
            for (int j = 0; j < SIZE; j += 2)
                *(float2*)(out + PART_HEADER + (32 * c + lane) * SIZE + j) =
                    make_float2(part.values[c * SIZE + j], part.values[c * SIZE + j + 1]);
        return;
    }
    Part<V> all;
    all.clear();
    for (int first = 0; first < keys.n_keys; first += KEYS_PER_PART) {
        attend_part(part, q, keys, first, lane, scale);
        all.join(part);
    }
    finish_head(all, sinks[head], output + job * 32 * V, lane, frequencies, n_rotary, position);
}

// Parts that are loaded before the first of them is joined.
#define PARTS_AT_ONCE 24

// Joins the parts that `attend` kept apart, in the same order as one warp would. One block a head of a token, a thread
// two channels.
extern "C" __global__ void join_parts(
    const float* parts, const float* sinks, const float* frequencies, const int* positions, float* output, int width,
    int n_heads, int n_rotary, int kind, int window, int ratio, int top_k, int n_parts, int keys_per_part) {
    int token = blockIdx.x / n_heads, head = blockIdx.x % n_heads, channel = 2 * threadIdx.x;
    int rotary = channel - (width - 2 * n_rotary);
    float sink = sinks[head], frequency = rotary >= 0 ? frequencies[rotary / 2] : 0.0f;
    await_previous();
    int position = positions[token];
    Keys<float> keys = keys_of<float>(0, 0, 0, kind, position, token, 0, window, ratio, top_k);
    int n = (keys.n_keys + keys_per_part - 1) / keys_per_part, stride = PART_HEADER + width;
    const float* in = parts + (u64)blockIdx.x * n_parts * stride;
    Part<2> all;
    all.clear();
    for (int first = 0; first < n; first += PARTS_AT_ONCE) {
        float2 heads[PARTS_AT_ONCE], values[PARTS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            const float* from = in + min(first + i, n - 1) * stride;
            heads[i] = *(const float2*)from;
            values[i] = *(const float2*)(from + PART_HEADER + channel);
        }
#pragma unroll
        for (int i = 0; i < PARTS_AT_ONCE; i++) {
            if (first + i >= n) break;
            Part<2> part = {heads[i].x, heads[i].y, {values[i].x, values[i].y}};
            all.join(part);
        }
    }
    float largest = fmaxf(all.largest, sink), keep = expf(all.largest - largest);
    float factor = keep / fmaf(all.sum, keep, expf(sink - largest));
    float2 pair = {all.values[0] * factor, all.values[1] * factor};
    if (rotary >= 0) {
        float2 angle = rotary_angle(position, frequency);
        angle.y = -angle.y;
        pair = rotate(pair, angle);
    }
    *(float2*)(output + (u64)blockIdx.x * width + channel) = pair;
}

#define ATTEND(NAME, S, V)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) attend_##NAME(                                                    \
        const float* queries, const S* ring, const S* rows, const int* chosen, const float* sinks,                      \
        const float* frequencies, const int* positions, float* output, float* parts, int n_heads, int n_rotary,         \
        int kind, int ring_mask, int window, int ratio, int top_k, int n_parts, float scale) {                          \
        await_previous();                                                                                               \
        attend<S, V>(queries, ring, rows, chosen, sinks, frequencies, positions, output, parts, n_heads, n_rotary,      \
                     kind, ring_mask, window, ratio, top_k, n_parts, scale);                                            \
    }
ATTEND(float_64, float, 2)
ATTEND(float_128, float, 4)
ATTEND(float_256, float, 8)
ATTEND(float_512, float, 16)
