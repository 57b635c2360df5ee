// The router's choice, (4.7.1 to 4.7.3). One warp a token, up to 512 experts.

static __device__ __forceinline__ float router_score(float logit) {
    return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// Weights of the chosen experts from their scores, in the order of choice: one lane an expert.
static __device__ __forceinline__ void write_choice(
    const float* logits, int chosen, int n_used, float scaling, int* experts, float* weights) {
    int lane = threadIdx.x & 31;
    float score = lane < n_used ? router_score(logits[chosen]) : 0.0f, sum = 0.0f;
    for (int i = 0; i < n_used; i++) sum += __shfl_sync(ALL_LANES, score, i);
    sum += 1e-20f;
    if (lane < n_used) {
        experts[lane] = chosen;
        weights[lane] = score / sum * scaling;
    }
}

// By token id: table [vocabulary, n_used]. One warp a token.
extern "C" __global__ void route_by_table(
    const float* logits, const int* table, const int* tokens, int* experts, float* weights,
    int n_tokens, int n_experts, int n_used, float scaling) {
    await_previous();
    int token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (token >= n_tokens) return;
    int chosen = table[(u64)tokens[token] * n_used + min(lane, n_used - 1)];
    write_choice(
        logits + (u64)token * n_experts, chosen, n_used, scaling, experts + token * n_used, weights + token * n_used);
}

// The largest scores plus biases, lower expert first among equals.
extern "C" __global__ void route_by_score(
    const float* logits, const float* bias, int* experts, float* weights,
    int n_tokens, int n_experts, int n_used, float scaling) {
    await_previous();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int token = blockIdx.x * (blockDim.x >> 5) + warp;
    if (token >= n_tokens) return;
    const float* row = logits + (u64)token * n_experts;
    // Scores as integers in the same order; 0 is below them all.
    u32 keys[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int expert = lane + 32 * i;
        keys[i] = expert < n_experts ? sort_key(router_score(row[expert]) + bias[expert]) : 0u;
    }
    int chosen = 0;
    for (int slot = 0; slot < n_used; slot++) {
        u32 best = 0;
        int expert = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (keys[i] > best) {
                best = keys[i];
                expert = lane + 32 * i;
            }
        u32 most = __reduce_max_sync(ALL_LANES, best);
        expert = __reduce_min_sync(ALL_LANES, best == most ? expert : 0x7fffffff);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (lane + 32 * i == expert) keys[i] = 0u;
        if (lane == slot) chosen = expert;
    }
    write_choice(row, chosen, n_used, scaling, experts + token * n_used, weights + token * n_used);
}
