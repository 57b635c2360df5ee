// The router's choice, (4.7.1 to 4.7.3). One warp a token, up to 512 experts. The kernel of the experts begins behind what the
// router waits for, and not before: it would take the multiprocessors away from the shared expert, which runs beside.

static __device__ __forceinline__ float router_score(float logit) {
    return sqrtf(logit > 20.0f ? logit : log1pf(expf(logit)));
}

// Weights of the chosen experts from their scores, in the order of choice: one lane an expert.
static __device__ __forceinline__ void write_choice(float score, int chosen, int n_used, float scaling, int* experts, float* weights) {
    int lane = threadIdx.x & 31;
    float sum = 0.0f;
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
    await_previous_first();
    int token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (token >= n_tokens) return;
    int chosen = table[(u64)tokens[token] * n_used + min(lane, n_used - 1)];
    float score = lane < n_used ? router_score(logits[(u64)token * n_experts + chosen]) : 0.0f;
    write_choice(score, chosen, n_used, scaling, experts + token * n_used, weights + token * n_used);
}

// Threads of a block, and experts of each at most.
#define ROUTING 128
#define EXPERTS_EACH 4

// The largest scores plus biases, lower expert first among equals. One block a token; its first warp chooses.
extern "C" __global__ void __launch_bounds__(ROUTING) route_by_score(
    const float* logits, const float* bias, int* experts, float* weights,
    int n_tokens, int n_experts, int n_used, float scaling) {
    __shared__ u32 all_keys[ROUTING * EXPERTS_EACH];
    __shared__ float all_scores[ROUTING * EXPERTS_EACH];
    int token = blockIdx.x, lane = threadIdx.x & 31;
    float biases[EXPERTS_EACH];
#pragma unroll
    for (int i = 0; i < EXPERTS_EACH; i++) biases[i] = bias[min((int)threadIdx.x + ROUTING * i, n_experts - 1)];
    await_previous_first();
    // Scores as integers in the same order; 0 is below them all.
#pragma unroll
    for (int i = 0; i < EXPERTS_EACH; i++) {
        int expert = threadIdx.x + ROUTING * i;
        if (expert >= n_experts && expert >= ROUTING) continue;
        float score = router_score(logits[(u64)token * n_experts + min(expert, n_experts - 1)]);
        all_scores[expert] = score;
        all_keys[expert] = expert < n_experts ? sort_key(score + biases[i]) : 0u;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    u32 keys[ROUTING * EXPERTS_EACH / 32];
#pragma unroll
    for (int i = 0; i < ROUTING * EXPERTS_EACH / 32; i++) keys[i] = lane + 32 * i < n_experts ? all_keys[lane + 32 * i] : 0u;
    int chosen = 0;
    for (int slot = 0; slot < n_used; slot++) {
        u32 best = 0;
        int expert = 0x7fffffff;
#pragma unroll
        for (int i = 0; i < ROUTING * EXPERTS_EACH / 32; i++)
            if (keys[i] > best) {
                best = keys[i];
                expert = lane + 32 * i;
            }
        u32 most = __reduce_max_sync(ALL_LANES, best);
        expert = __reduce_min_sync(ALL_LANES, best == most ? expert : 0x7fffffff);
#pragma unroll
        for (int i = 0; i < ROUTING * EXPERTS_EACH / 32; i++)
            if (lane + 32 * i == expert) keys[i] = 0u;
        if (lane == slot) chosen = expert;
    }
    float score = lane < n_used ? all_scores[chosen] : 0.0f;
    write_choice(score, chosen, n_used, scaling, experts + token * n_used, weights + token * n_used);
}
