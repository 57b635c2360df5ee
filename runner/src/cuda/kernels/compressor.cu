// Compressors, (4.5). Values and gates of the tokens before the piece at hand are in a ring of `n_slots` rows: slot t % n_slots.

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
    int n_slots = overlapping ? 2 * ratio : ratio, n_channels = overlapping ? width / 2 : width;
    int first_token = overlapping ? (window - 1) * ratio : window * ratio;
    float sum_of_squares = 0.0f;
    for (int channel = threadIdx.x; channel < n_channels; channel += blockDim.x) {
        float largest = NEGATIVE_INFINITY, sum = 0.0f, weighted = 0.0f;
        for (int pass = 0; pass < 2; pass++)
            for (int slot = first_token < 0 ? ratio : 0; slot < n_slots; slot++) {
                int token = first_token + slot, at = channel + (overlapping && slot >= ratio ? n_channels : 0);
                bool old = token < first;
                u64 from = (u64)(old ? token % n_slots : token - first) * width + at;
                float gate = (old ? kept_gates : gates)[from] + position_bias[slot % ratio * width + at];
                if (pass == 0) {
                    largest = fmaxf(largest, gate);
                } else {
                    float weight = expf(gate - largest);
                    sum += weight;
                    weighted = fmaf(weight, (old ? kept_values : values)[from], weighted);
                }
            }
        float value = weighted / sum;
        row[channel] = value;
        sum_of_squares = fmaf(value, value, sum_of_squares);
    }
    float factor = inverse_rms(block_sum(sum_of_squares, scratch), n_channels, epsilon);
    for (int channel = threadIdx.x; channel < n_channels; channel += blockDim.x)
        row[channel] = row[channel] * factor * norm[channel];
    __syncthreads();
    rotate_row(row, n_channels, frequencies, n_rotary, window * ratio);
    __syncthreads();
    if (rounding == 1) round_row_to_fp8(row, n_channels - 2 * n_rotary);
    if (rounding == 2 && threadIdx.x < 32) {
        if (n_channels == 128) rotate_and_round_row<4>(row, hadamard_factor);
        else if (n_channels == 64) rotate_and_round_row<2>(row, hadamard_factor);
        else if (n_channels == 256) rotate_and_round_row<8>(row, hadamard_factor);
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < n_channels; channel += blockDim.x)
        store(rows + (u64)window * n_channels + channel, row[channel]);
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
