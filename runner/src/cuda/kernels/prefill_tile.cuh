// What both ways to multiply a tile of rows by a tile of inputs share, see matrix_prefill.cu: where weights and inputs come
// from, and where in shared memory they go.

// Inputs of a tile: f16 rows of `stride` values; input n is row rows[n] (shared memory) for n < count.
struct Inputs {
    const u16* values;
    u64 stride;
    const u32* rows;
    u32 count;
};

// Rows of a tile: `first_row` and those behind it, none beyond `last_row`. If PAIRED, 16 come from one matrix, 16 from the
// other, and so on in turn.
template <bool PAIRED> struct Rows {
    const Weights& first;
    const Weights& second;
    u32 first_row;
    u32 last_row;

    __device__ __forceinline__ u32 row(u32 local) const {
        return min(first_row + (PAIRED ? local / 32 * 16 + local % 16 : local), last_row);
    }
    __device__ __forceinline__ Weights matrix(u32 local) const {
        return {PAIRED && local / 16 % 2 ? second.planes : first.planes, first.rows};
    }
};

// Where in shared memory the stages of a tile are.
template <class F, int ROWS, int TOKENS> struct Stages {
    static constexpr int NUMBER = F::STAGES;
    static constexpr int CODES = ROWS * F::PITCH;
    // Eight lanes that read together meet every bank once; what the tensor cores read has no gaps.
    static constexpr int INPUT_PITCH = WARP_GROUPS ? F::KC * 2 : F::KC * 2 + 64;
    // Where scales begin.
    static constexpr int SCALES = CODES + TOKENS * INPUT_PITCH;
    static constexpr int BYTES = SCALES + (F::SCALES ? ROWS * 4 : 0);
    static constexpr int ALL_BYTES = NUMBER * BYTES;
};

// Where a piece of 16 bytes of an input lies among those of a stage.
template <class F, int ROWS, int TOKENS> static __device__ __forceinline__ u32 input_place(u32 n, u32 piece) {
#if WARP_GROUPS
    // Rows of 128 bytes, in which pieces are swapped by the row's number, as `described` says.
    return piece / 8 * (TOKENS * 128) + n * 128 + (piece % 8 ^ n % 8) * 16;
#else
    return n * Stages<F, ROWS, TOKENS>::INPUT_PITCH + piece * 16;
#endif
}

// What a thread copies to shared memory in every step.
template <class F, int ROWS, int TOKENS, bool PAIRED> struct Copies {
    typedef Stages<F, ROWS, TOKENS> At;
    static constexpr u32 SLOTS = F::PIECES > 4 ? 8 : F::PIECES > 2 ? 4 : 2, ROWS_AT_ONCE = THREADS / SLOTS;
    static constexpr u32 INPUT_PIECES = F::KC / 8, INPUTS_AT_ONCE = THREADS / INPUT_PIECES, INPUTS = TOKENS / INPUTS_AT_ONCE;
    static constexpr u32 ABSENT = 0xffffffffu;

    // Of the first row that the thread copies pieces of.
    const u8* piece;
    u32 stride;
    // How many rows behind that the last one is.
    u32 last;
    const u8* scales;
    bool odd;
    const u16* values;
    // Eights of values before the thread's inputs.
    u32 inputs[INPUTS];
    u32 n_inputs;
    u32 thread;

    __device__ __forceinline__ Copies(const Rows<PAIRED>& rows, const Inputs& x, u32 thread, u32 columns) : thread(thread) {
        const u32 slot = thread / SLOTS, row = rows.row(slot);
        piece = F::piece(rows.matrix(slot), row, columns, thread % SLOTS);
        stride = F::stride(columns, thread % SLOTS);
        last = rows.last_row - row;
        scales = F::scales(rows.matrix(thread), rows.row(thread), columns);
        odd = F::odd(rows.row(thread), columns);
        values = x.values;
        n_inputs = (x.count + 7) / 8 * 8;
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            u32 n = i * INPUTS_AT_ONCE + thread / INPUT_PIECES;
            inputs[i] = n < x.count ? x.rows[n] * (u32)(x.stride / 8) + thread % INPUT_PIECES : ABSENT;
        }
    }

    // stage: in shared memory.
    __device__ __forceinline__ void begin(u32 step, u32 stage) const {
        const u32 slot = thread / SLOTS, from = F::advance(step, thread % SLOTS);
        const u32 to = stage + slot * F::PITCH + F::place(slot, thread % SLOTS) * 16;
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
            u32 behind = min(i * ROWS_AT_ONCE / (PAIRED ? 2 : 1), last);
            if (thread % SLOTS < F::PIECES) copy_async(to + i * ROWS_AT_ONCE * F::PITCH, piece + (behind * stride + from));
        }
        if (F::SCALES && (ROWS == THREADS || thread < ROWS)) {
            copy_word_async(stage + At::SCALES + thread * 4, scales + F::scales_advance(step, odd));
        }
        const u32 n = thread / INPUT_PIECES, place = stage + At::CODES + input_place<F, ROWS, TOKENS>(n, thread % INPUT_PIECES);
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            // Products with what lies behind the last eight inputs that there are belong to nobody.
            if (i * INPUTS_AT_ONCE + n < n_inputs) {
                bool inside = inputs[i] != ABSENT;
                const u16* value = values + (u64)((inside ? inputs[i] : 0) + step * (F::KC / 8)) * 8;
                copy_async_or_zero(place + input_place<F, ROWS, TOKENS>(i * INPUTS_AT_ONCE, 0), value, inside);
            }
        }
    }
};

// Which of a lane's rows, g and g + 8 of each m, are odd in the format's sense: a bit each.
template <class F, int M, bool PAIRED>
static __device__ __forceinline__ u32 odd_rows(const Rows<PAIRED>& rows, u32 warp, u32 g, u32 columns) {
    u32 odd = 0;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) odd |= F::odd(rows.row(warp * 16 * M + r * 8 + g), columns) ? 1u << r : 0;
    return odd;
}

// Widens eight weights of a row: left operands of the first four of each lane, then of the other four. r: the lower row or
// the upper.
template <class F>
static __device__ __forceinline__ void widen(const typename F::Raw& raw, int part, int r, const typename F::Table& table,
                                             u32 (&a)[2][4]) {
    u32 w[4];
    F::widen(raw, part, table, w);
    a[0][r] = w[0];
    a[0][2 + r] = w[1];
    a[1][r] = w[2];
    a[1][2 + r] = w[3];
}

template <int M, int N> static __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
}
