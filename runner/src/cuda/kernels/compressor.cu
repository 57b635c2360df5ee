// Compressors, (4.5). Values and gates of the tokens before the piece at hand are in a ring of `n_slots` rows: slot t % n_slots.

// Slots whose values are on their way together.
#define SLOTS_AT_ONCE 8

// What a compressor reads: values and gates of new tokens and of those before, [.., width], and the weights.
struct Windows {
    const float *values, *gates, *kept_values, *kept_gates, *position_bias, *norm;
    // Position of the first new token.
    int first, ratio, width, overlapping;
};

// A channel of a window: the mean of its values, weighed by the softmax of their gates.
static __device__ __forceinline__ float weighted_mean(const Windows& w, int window, int channel) {
    int n_slots = w.overlapping ? 2 * w.ratio : w.ratio, n_channels = w.overlapping ? w.width / 2 : w.width;
    int first_token = w.overlapping ? (window - 1) * w.ratio : window * w.ratio, begin = first_token < 0 ? w.ratio : 0;
    float gates[SLOTS_AT_ONCE], values[SLOTS_AT_ONCE];
    auto load = [&](int first, bool gates_only) {
#pragma unroll
        for (int i = 0; i < SLOTS_AT_ONCE; i++) {
            int slot = min(first + i, n_slots - 1), token = first_token + slot;
            int at = channel + (w.overlapping && slot >= w.ratio ? n_channels : 0);
            bool old = token < w.first;
            u32 from = (u32)(old ? token % n_slots : token - w.first) * w.width + at;
            gates[i] = (old ? w.kept_gates : w.gates)[from] + w.position_bias[slot % w.ratio * w.width + at];
            if (!gates_only) values[i] = (old ? w.kept_values : w.values)[from];
        }
    };
    float largest = NEGATIVE_INFINITY, sum = 0.0f, weighted = 0.0f;
    // Where all slots fit they are loaded once, and together.
    bool once = n_slots - begin <= SLOTS_AT_ONCE;
    for (int first = begin; first < n_slots; first += SLOTS_AT_ONCE) {
        load(first, !once);
#pragma unroll
        for (int i = 0; i < SLOTS_AT_ONCE; i++)
            if (first + i < n_slots) largest = fmaxf(largest, gates[i]);
    }
    for (int first = begin; first < n_slots; first += SLOTS_AT_ONCE) {
        if (!once) load(first, false);
#pragma unroll
        for (int i = 0; i < SLOTS_AT_ONCE; i++) {
            if (first + i >= n_slots) break;
            float weight = expf(gates[i] - largest);
            sum += weight;
            weighted = fmaf(weight, values[i], weighted);
        }
    }
    return weighted / sum;
}

// The row of a window, by a block; `row`: shared memory for it, `scratch`: for 32 values.
template <typename S>
static __device__ __forceinline__ void emit_row(
    const Windows& w, int window, S* to, const float* frequencies, int n_rotary, float epsilon, int rounding,
    float hadamard_factor, float* row, float* scratch) {
    int n_channels = w.overlapping ? w.width / 2 : w.width;
    float sum_of_squares = 0.0f;
    for (int channel = threadIdx.x; channel < n_channels; channel += blockDim.x) {
        float value = weighted_mean(w, window, channel);
        row[channel] = value;
        sum_of_squares = fmaf(value, value, sum_of_squares);
    }
    float factor = inverse_rms(block_sum(sum_of_squares, scratch), n_channels, epsilon);
    for (int channel = threadIdx.x; channel < n_channels; channel += blockDim.x)
        row[channel] = row[channel] * factor * w.norm[channel];
    __syncthreads();
    rotate_row(row, n_channels, frequencies, n_rotary, window * w.ratio);
    __syncthreads();
    if (rounding == 1) round_row_to_fp8(row, n_channels - 2 * n_rotary);
    if (rounding == 2 && threadIdx.x < 32) {
        if (n_channels == 128) rotate_and_round_row<4>(row, hadamard_factor);
        else if (n_channels == 64) rotate_and_round_row<2>(row, hadamard_factor);
        else if (n_channels == 256) rotate_and_round_row<8>(row, hadamard_factor);
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < n_channels; channel += blockDim.x)
        store(to + (u64)window * n_channels + channel, row[channel]);
}

// One block for each window that the piece may complete; `width` values a token, twice as many as a row has if windows overlap.
template <typename S>
static __device__ __forceinline__ void emit_rows(
    const float* values, const float* gates, const float* kept_values, const float* kept_gates,
    const float* position_bias, const float* norm, const float* frequencies, const int* positions, S* rows,
    int n_tokens, int ratio, int width, int overlapping, int n_rotary, float epsilon, int rounding, float hadamard_factor) {
    extern __shared__ float row[];
    __shared__ float scratch[32];
    int first = positions[0], window = first / ratio + blockIdx.x;
    if ((window + 1) * ratio > first + n_tokens) return;
    Windows w = {values, gates, kept_values, kept_gates, position_bias, norm, first, ratio, width, overlapping};
    emit_row(w, window, rows, frequencies, n_rotary, epsilon, rounding, hadamard_factor, row, scratch);
}

extern "C" __global__ void emit_rows_half(
    const float* values, const float* gates, const float* kept_values, const float* kept_gates,
    const float* position_bias, const float* norm, const float* frequencies, const int* positions, u16* rows,
    int n_tokens, int ratio, int width, int overlapping, int n_rotary, float epsilon, int rounding, float hadamard_factor) {
    await_previous();
    emit_rows(values, gates, kept_values, kept_gates, position_bias, norm, frequencies, positions, rows, n_tokens,
              ratio, width, overlapping, n_rotary, epsilon, rounding, hadamard_factor);
}

extern "C" __global__ void emit_rows_float(
    const float* values, const float* gates, const float* kept_values, const float* kept_gates,
    const float* position_bias, const float* norm, const float* frequencies, const int* positions, float* rows,
    int n_tokens, int ratio, int width, int overlapping, int n_rotary, float epsilon, int rounding, float hadamard_factor) {
    await_previous();
    emit_rows(values, gates, kept_values, kept_gates, position_bias, norm, frequencies, positions, rows, n_tokens,
              ratio, width, overlapping, n_rotary, epsilon, rounding, hadamard_factor);
}

// Keeps values and gates of the piece's last tokens for the windows that follow. One block a token that is kept.
extern "C" __global__ void keep_tokens(
    const float* values, const float* gates, float* kept_values, float* kept_gates, const int* positions,
    int n_tokens, int n_slots, int width) {
    await_previous();
    int token = n_tokens - 1 - blockIdx.x;
    u64 from = (u64)token * width, to = (u64)((positions[0] + token) % n_slots) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        kept_values[to + i] = values[from + i];
        kept_gates[to + i] = gates[from + i];
    }
}

// A compressor and what is behind it, as the host declares it.
struct Compressing {
    const float *values, *gates;
    float *kept_values, *kept_gates;
    const float *position_bias, *norm;
    void* rows;
    int width, rounding;
    float hadamard_factor;
    u32 unused;
};

struct BothCompressing {
    Compressing of[2];
};

// (4.4.3) The row of the window of one token, of `width` values, at most four a thread, of which `weights` are the norm's: the
// bits are those of `rms_norm`, `kv_finish` and `append_window` one after the other.
template <typename S, typename Angle>
static __device__ __forceinline__ void append_row(
    const float* key_value, float4 weights, S* slot, const Angle& angle, int width, int n_rotary, float epsilon, int official,
    float* row, float* scratch) {
    int own = threadIdx.x;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), w = weights;
    if (own < width / 4) v = ((const float4*)key_value)[own];
    float sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
    float factor = inverse_rms(block_sum(sum, scratch), width, epsilon);
    if (own < width / 4) {
        v.x = v.x * factor * w.x, v.y = v.y * factor * w.y, v.z = v.z * factor * w.z, v.w = v.w * factor * w.w;
        ((float4*)row)[own] = v;
    }
    __syncthreads();
    rotate_row(row, width, angle, n_rotary);
    if (official) round_row_to_fp8(row, width - 2 * n_rotary);
    __syncthreads();
    for (int i = own; i < width; i += blockDim.x) store(slot + i, row[i]);
}

// What a compressor makes of one token, and what it keeps of it: the bits are those of `emit_rows` and `keep_tokens`. The slot that
// is overwritten is of a token that no window needs any more.
template <typename S>
static __device__ __forceinline__ void compress_token(
    const Compressing& c, const float* frequencies, int position, int ratio, int overlapping, int n_rotary, float epsilon,
    float* row, float* scratch) {
    if ((position + 1) % ratio == 0) {
        Windows w = {c.values, c.gates, c.kept_values, c.kept_gates, c.position_bias, c.norm, position, ratio, c.width, overlapping};
        emit_row(w, position / ratio, (S*)c.rows, frequencies, n_rotary, epsilon, c.rounding, c.hadamard_factor, row, scratch);
    }
    u64 slot = (u64)(position % (overlapping ? 2 * ratio : ratio)) * c.width;
    // Four at once, for each round of loads takes long.
    for (int i = threadIdx.x; i < c.width / 4; i += blockDim.x) {
        float4 value = ((const float4*)c.values)[i], gate = ((const float4*)c.gates)[i];
        ((float4*)(c.kept_values + slot))[i] = value;
        ((float4*)(c.kept_gates + slot))[i] = gate;
    }
}

// Rotary pairs whose angles a block keeps.
#define MOST_ANGLES 64

// One token's queries, and all that it adds to the cache of a layer. The first block makes its row of the window, the next ones
// what compressors make of it; then a warp finishes a head, those of attention first. Bits as of the kernels for each of these.
template <typename S>
static __device__ __forceinline__ void finish_token(
    float* queries, float* index_queries, int n_heads, int head_dim, int n_index_heads, int index_width, float index_factor,
    float query_epsilon, const float* key_value, const float* norm, S* ring, const BothCompressing& compressors,
    int n_compressors, const float* frequencies, const int* positions, int width, int ring_mask, int ratio, int overlapping,
    int n_rotary, float epsilon, int official) {
    extern __shared__ float row[];
    __shared__ float scratch[32];
    __shared__ float2 angles[MOST_ANGLES];
    // The host wrote the position long ago: what depends on it and on weights alone comes before the wait.
    int position = positions[0], n_angles = min(n_rotary, MOST_ANGLES);
    for (int i = threadIdx.x; i < n_angles; i += blockDim.x) angles[i] = rotary_angle(position, frequencies[i]);
    auto angle = [&](int i) { return i < MOST_ANGLES ? angles[i] : rotary_angle(position, frequencies[i]); };
    float4 weights = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (blockIdx.x == 0 && threadIdx.x < width / 4) weights = ((const float4*)norm)[threadIdx.x];
    __syncthreads();
    await_previous_first();
    if (blockIdx.x == 0) {
        S* slot = ring + (u64)(position & ring_mask) * width;
        append_row(key_value, weights, slot, angle, width, n_rotary, epsilon, official, row, scratch);
    } else if ((int)blockIdx.x <= n_compressors) {
        const Compressing& c = compressors.of[blockIdx.x - 1];
        compress_token<S>(c, frequencies, position, ratio, overlapping, n_rotary, epsilon, row, scratch);
    } else {
        int job = (blockIdx.x - 1 - n_compressors) * (blockDim.x / WARP) + threadIdx.x / WARP;
        if (job < n_heads) {
            finish_query(queries + (u64)job * head_dim, angle, head_dim, n_rotary, query_epsilon);
        } else if ((job -= n_heads) < n_index_heads) {
            float* head = index_queries + (u64)job * index_width;
            if (index_width == 128) finish_index_query<4>(head, angle, n_rotary, official, index_factor);
            else if (index_width == 64) finish_index_query<2>(head, angle, n_rotary, official, index_factor);
            else if (index_width == 256) finish_index_query<8>(head, angle, n_rotary, official, index_factor);
        }
    }
}

#define FINISH_TOKEN(NAME, S)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 1) finish_token_##NAME(                                             \
        float* queries, float* index_queries, int n_heads, int head_dim, int n_index_heads, int index_width,              \
        float index_factor, float query_epsilon, const float* key_value, const float* norm, S* ring,                      \
        const __grid_constant__ BothCompressing compressors, int n_compressors, const float* frequencies,                 \
        const int* positions, int width, int ring_mask, int ratio, int overlapping, int n_rotary, float epsilon,          \
        int official) {                                                                                                   \
        finish_token<S>(queries, index_queries, n_heads, head_dim, n_index_heads, index_width, index_factor,              \
                        query_epsilon, key_value, norm, ring, compressors, n_compressors, frequencies, positions, width,  \
                        ring_mask, ratio, overlapping, n_rotary, epsilon, official);                                      \
    }
FINISH_TOKEN(half, u16)
FINISH_TOKEN(float, float)
