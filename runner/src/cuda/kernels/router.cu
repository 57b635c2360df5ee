// The router's choice, (4.7.1 to 4.7.3). One warp a token, up to 512 experts.

static __device__ __forceinline__ float router_score(float logit) {
    return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// Weights of the chosen experts from their scores, in the order of choice.
static __device__ void write_choice(
    const float* logits, const int* chosen, int n_used, float scaling, int* experts, float* weights) {
    float sum = 0.0f;
    for (int i = 0; i < n_used; i++) sum += router_score(logits[chosen[i]]);
    sum += 1e-20f;
    for (int i = 0; i < n_used; i++) {
        experts[i] = chosen[i];
        weights[i] = router_score(logits[chosen[i]]) / sum * scaling;
    }
}

// By token id: table [vocabulary, n_used].
extern "C" __global__ void route_by_table(
    const float* logits, const int* table, const int* tokens, int* experts, float* weights,
    int n_tokens, int n_experts, int n_used, float scaling) {
    int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= n_tokens) return;
    write_choice(
        logits + (u64)token * n_experts, table + (u64)tokens[token] * n_used, n_used, scaling,
        experts + token * n_used, weights + token * n_used);
}

// The largest scores plus biases, lower expert first among equals.
extern "C" __global__ void route_by_score(
    const float* logits, const float* bias, int* experts, float* weights,
    int n_tokens, int n_experts, int n_used, float scaling) {
    __shared__ int all_chosen[8][32];
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int token = blockIdx.x * (blockDim.x >> 5) + warp;
    if (token >= n_tokens) return;
    const float* row = logits + (u64)token * n_experts;
    float biased[16];
    u32 taken = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int expert = lane + 32 * i;
        if (expert < n_experts) biased[i] = router_score(row[expert]) + bias[expert];
        else taken |= 1u << i;
    }
    int* chosen = all_chosen[warp];
    for (int slot = 0; slot < n_used; slot++) {
        float best = NEGATIVE_INFINITY;
        int best_expert = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int expert = lane + 32 * i;
            if (!(taken >> i & 1) && (biased[i] > best || best_expert == 0x7fffffff)) {
                best = biased[i];
                best_expert = expert;
            }
        }
#pragma unroll
        for (int apart = 16; apart; apart >>= 1) {
            float other = __shfl_xor_sync(~0u, best, apart);
            int other_expert = __shfl_xor_sync(~0u, best_expert, apart);
            if (other > best || (other == best && other_expert < best_expert)) {
                best = other;
                best_expert = other_expert;
            }
        }
        if ((best_expert & 31) == lane) taken |= 1u << (best_expert >> 5);
        if (lane == 0) chosen[slot] = best_expert;
    }
    __syncwarp();
    if (lane == 0)
        write_choice(row, chosen, n_used, scaling, experts + token * n_used, weights + token * n_used);
}
