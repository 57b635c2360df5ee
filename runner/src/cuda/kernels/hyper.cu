// Hyper-connections, (3.6). One block a token; M streams of width D, M * M lanes of a warp hold the mixing matrix.

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static __device__ __forceinline__ float streams_inverse_rms(const float* streams, int n, float epsilon, float* scratch) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(streams[i], streams[i], sum);
    return inverse_rms(block_sum(sum, scratch), n, epsilon);
}

// x = sum of pre_j X[j]
static __device__ __forceinline__ void merge_streams(const float* streams, const float* pre, float* x, int d, int m) {
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = 0.0f;
        for (int j = 0; j < m; j++) sum = fmaf(pre[j], streams[j * d + i], sum);
        x[i] = sum;
    }
}

// mixes [T, (2 + M) M], the mixer's products; post [T, M]; comb [T, M * M], [old, new].
extern "C" __global__ void hc_pre(
    const float* all_streams, const float* mixes, const float* scale, const float* base,
    float* x, float* post, float* comb, int d, int m, int iterations, float epsilon, float rms_epsilon) {
    __shared__ float scratch[32];
    __shared__ float pre[8];
    u64 token = blockIdx.x;
    const float* streams = all_streams + token * m * d;
    float factor = streams_inverse_rms(streams, m * d, rms_epsilon, scratch);
    if (threadIdx.x < 32) {
        int lane = threadIdx.x, n = m * m;
        const float* mix = mixes + token * (2 + m) * m;
        if (lane < m) {
            pre[lane] = sigmoid(mix[lane] * factor * scale[0] + base[lane]) + epsilon;
            post[token * m + lane] = 2.0f * sigmoid(mix[m + lane] * factor * scale[1] + base[m + lane]);
        }
        int at = min(lane, n - 1), row = at / m * m, column = at % m;
        float c = mix[2 * m + at] * factor * scale[2] + base[2 * m + at];
        // Sinkhorn: a softmax of the rows, then columns and rows in turn, columns last.
        float largest = NEGATIVE_INFINITY, sum = 0.0f;
        for (int i = 0; i < m; i++) largest = fmaxf(largest, __shfl_sync(~0u, c, row + i));
        c = expf(c - largest);
        for (int i = 0; i < m; i++) sum += __shfl_sync(~0u, c, row + i);
        c = c / sum + epsilon;
        for (int pass = 0; pass < iterations; pass++) {
            if (pass > 0) {
                sum = 0.0f;
                for (int i = 0; i < m; i++) sum += __shfl_sync(~0u, c, row + i);
                c /= sum + epsilon;
            }
            sum = 0.0f;
            for (int i = 0; i < m; i++) sum += __shfl_sync(~0u, c, i * m + column);
            c /= sum + epsilon;
        }
        if (lane < n) comb[token * n + lane] = c;
    }
    __syncthreads();
    merge_streams(streams, pre, x + token * d, d, m);
}

// mixes [T, M]; scale [1].
extern "C" __global__ void hc_head(
    const float* all_streams, const float* mixes, const float* scale, const float* base,
    float* x, int d, int m, float epsilon, float rms_epsilon) {
    __shared__ float scratch[32];
    __shared__ float pre[8];
    u64 token = blockIdx.x;
    const float* streams = all_streams + token * m * d;
    float factor = streams_inverse_rms(streams, m * d, rms_epsilon, scratch);
    if (threadIdx.x < m)
        pre[threadIdx.x] = sigmoid(mixes[token * m + threadIdx.x] * factor * scale[0] + base[threadIdx.x]) + epsilon;
    __syncthreads();
    merge_streams(streams, pre, x + token * d, d, m);
}

// X'[k] = post_k y + sum over j of C[j, k] X[j]. Grid: columns by tokens.
extern "C" __global__ void hc_post(
    float* all_streams, const float* output, const float* post, const float* comb, int d, int m) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    u64 token = blockIdx.y;
    if (i >= d) return;
    float* streams = all_streams + token * m * d + i;
    float y = output[token * d + i], old[8];
    for (int j = 0; j < m; j++) old[j] = streams[(u64)j * d];
    for (int k = 0; k < m; k++) {
        float mixed = post[token * m + k] * y;
        for (int j = 0; j < m; j++) mixed = fmaf(comb[token * m * m + j * m + k], old[j], mixed);
        streams[(u64)k * d] = mixed;
    }
}
