// Operations on rows of activations: norms, sums, streams of the embedding, steering, the search for broken values.

// (3.1) One block a row. Weights and the first values are on their way before anything is summed.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(
    const float* input, const float* weights, float* output, int width, float epsilon) {
    __shared__ float scratch[32];
    if (width % 4) {
        await_previous();
        const float* row = input + (u64)blockIdx.x * width;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
        float factor = inverse_rms(block_sum(sum, scratch), width, epsilon);
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            output[(u64)blockIdx.x * width + i] = row[i] * factor * weights[i];
        return;
    }
    const float4 *row = (const float4*)(input + (u64)blockIdx.x * width), *factors = (const float4*)weights;
    float4* out = (float4*)(output + (u64)blockIdx.x * width);
    int quads = width / 4, first = threadIdx.x;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), w = v;
    if (first < quads) w = factors[first];
    await_previous();
    if (first < quads) v = row[first];
    float sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
    for (int i = first + blockDim.x; i < quads; i += blockDim.x) {
        float4 u = row[i];
        sum = fmaf(u.x, u.x, fmaf(u.y, u.y, fmaf(u.z, u.z, fmaf(u.w, u.w, sum))));
    }
    float factor = inverse_rms(block_sum(sum, scratch), width, epsilon);
    for (int i = first; i < quads; i += blockDim.x) {
        if (i != first) v = row[i], w = factors[i];
        v.x = v.x * factor * w.x, v.y = v.y * factor * w.y, v.z = v.z * factor * w.z, v.w = v.w * factor * w.w;
        out[i] = v;
    }
}

extern "C" __global__ void add_rows(float* values, const float* other, u32 n) {
    await_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] += other[i];
}

// (4.1) Copies the first stream of each token to the others. One block a token.
extern "C" __global__ void spread_streams(float* streams, int width, int n_streams) {
    await_previous();
    float* row = streams + (u64)blockIdx.x * n_streams * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        for (int stream = 1; stream < n_streams; stream++) row[stream * width + i] = row[i];
}

// y -= scale * d * (d . y). One block a row.
extern "C" __global__ void project_out(float* values, const float* direction, int width, float scale) {
    await_previous();
    __shared__ float scratch[32];
    float* row = values + (u64)blockIdx.x * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(row[i], direction[i], sum);
    float factor = scale * block_sum(sum, scratch);
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] -= factor * direction[i];
}

// Lowers *found to the index of the first value that is NaN or infinite.
extern "C" __global__ void first_not_finite(const float* values, u32 n, int* found) {
    await_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && !isfinite(values[i])) atomicMin(found, (int)i);
}

// (3.4) gate = silu(min(gate, limit)) * clamp(up, -limit, limit)
extern "C" __global__ void swiglu_rows(float* gate, const float* up, u32 n, float limit) {
    await_previous();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = fminf(gate[i], limit), u = fminf(fmaxf(up[i], -limit), limit);
    gate[i] = g / (1.0f + expf(-g)) * u;
}
