// Writes what ggml's CPU code makes of the inputs of matrix products: the goldens in test-vectors/rounding.
//
//   cc -O2 -I LLAMA/ggml/include -o ggml_rounding tools/ggml_rounding.c -L LLAMA_BIN_DIR -lggml-cpu -lggml-base -lm
//   ggml_rounding test-vectors/rounding
//   ggml_rounding test-vectors/rounding plain    with a libggml-cpu that docs/llamacpp.md calls plain
//
// inputs.f32: rows of 1024 values, each with its own kind of trouble. TYPE.inputs: those rows as the type's products
// take them (q8_0, q8_k, f16, bf16). TYPE.rows: two rows of random blocks; TYPE.products: f32, each row with each input.
// Of plain code the products alone are kept, as TYPE.plain_products, and inputs that it rounds in another way.
#include "ggml-cpu.h"
#include "ggml.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 1024, INPUTS = 4, ROWS = 2 };

static uint64_t state = 20261130;

static float uniform(void) { // -1 to 1
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

static void save(const char *folder, const char *name, const char *part, const void *data, size_t n_bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s.%s", folder, name, part);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, n_bytes, file) != n_bytes || fclose(file)) {
        fprintf(stderr, "cannot write %s\n", path);
        exit(1);
    }
}

static void fill(float *x) {
    for (int i = 0; i < INPUTS * WIDTH; i++) x[i] = uniform() * uniform() * 4;
    // Row 1: halves of a step, so that every value is a tie; the largest is 127 in each group of 32 and 256.
    for (int i = 0; i < WIDTH; i++) x[WIDTH + i] = (float)((i * 37) % 253 - 126) + 0.5f;
    for (int i = 0; i < WIDTH; i += 32) x[WIDTH + i] = i % 64 ? 127 : -127;
    // Row 2: zeros, one value alone, equal extremes of both signs, tiny and huge magnitudes.
    float *row = x + 2 * WIDTH;
    memset(row, 0, 256 * sizeof *row);
    row[256 + 40] = -3.25f;
    memset(row + 256, 0, 40 * sizeof *row);
    memset(row + 256 + 41, 0, (256 - 41) * sizeof *row);
    row[512] = 5;
    row[513] = -5;
    for (int i = 544; i < 576; i++) row[i] *= 1e-6f;
    for (int i = 576; i < 608; i++) row[i] *= 1e-30f;
    for (int i = 608; i < 640; i++) row[i] *= 1e4f;
    // Row 3: outliers.
    for (int i = 0; i < WIDTH; i += 97) x[3 * WIDTH + i] *= 50;
}

int main(int argc, char **argv) {
    const int plain = argc == 3 && !strcmp(argv[2], "plain");
    if (argc != 2 + plain) {
        fprintf(stderr, "usage: ggml_rounding FOLDER [plain]\n");
        return 2;
    }
    ggml_cpu_init();
    static float x[INPUTS * WIDTH], weights[ROWS * WIDTH], ones[WIDTH];
    static char inputs[INPUTS][WIDTH * 4], rows[ROWS * WIDTH * 4];
    fill(x);
    for (int i = 0; i < ROWS * WIDTH; i++) weights[i] = uniform() * uniform() * 0.1f;
    for (int i = 0; i < WIDTH; i++) ones[i] = 1;
    if (!plain) save(argv[1], "inputs", "f32", x, sizeof x);
    const enum ggml_type types[] = {GGML_TYPE_Q8_0, GGML_TYPE_MXFP4,   GGML_TYPE_Q2_K, GGML_TYPE_Q4_K,
                                    GGML_TYPE_Q6_K, GGML_TYPE_IQ2_XXS, GGML_TYPE_F16,  GGML_TYPE_BF16};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const char *name = ggml_type_name(types[t]);
        const struct ggml_type_traits_cpu *cpu = ggml_get_type_traits_cpu(types[t]);
        const struct ggml_type_traits_cpu *input_cpu = ggml_get_type_traits_cpu(cpu->vec_dot_type);
        const size_t row_bytes = ggml_row_size(types[t], WIDTH);
        const size_t input_bytes = ggml_row_size(cpu->vec_dot_type, WIDTH);
        ggml_quantize_chunk(types[t], weights, rows, 0, ROWS, WIDTH, ones);
        float products[ROWS * INPUTS];
        char all[INPUTS * WIDTH * 4];
        for (int i = 0; i < INPUTS; i++) {
            input_cpu->from_float(x + i * WIDTH, inputs[i], WIDTH);
            memcpy(all + i * input_bytes, inputs[i], input_bytes);
            for (int r = 0; r < ROWS; r++) {
                cpu->vec_dot(WIDTH, products + r * INPUTS + i, 0, rows + r * row_bytes, 0, inputs[i], 0, 1);
            }
        }
        if (plain) {
            save(argv[1], name, "plain_products", products, sizeof products);
            if (types[t] == GGML_TYPE_Q8_0) save(argv[1], name, "plain_inputs", all, INPUTS * input_bytes);
            continue;
        }
        save(argv[1], ggml_type_name(cpu->vec_dot_type), "inputs", all, INPUTS * input_bytes);
        save(argv[1], name, "rows", rows, ROWS * row_bytes);
        save(argv[1], name, "products", products, sizeof products);
    }
    return 0;
}
