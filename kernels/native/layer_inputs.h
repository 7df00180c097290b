/* Inputs by layer: each layer of some decoders gets a few channels of its own of every token (Gemma 4 E2B and E4B).
 *
 * A token's inputs are scale * (norm(product of the first layer's input) + embedding of its id). At the end of a layer
 * x += norm(projection(act(gate(x)) * input)). Invariant: a row's inputs depend only on this row. Not responsible for: the
 * loops that the team shares (see forward.h).
 */
#ifndef LOCKSTEP_LAYER_INPUTS_H
#define LOCKSTEP_LAYER_INPUTS_H

#include "blocks.h"

/* Of the model. `projection` has all layers' channels, one layer after the other. */
struct layer_inputs {
    struct block_weights projection;
    const void *embedding; /* [vocabulary][layers * width], in the dtype of the model's embedding */
    const float *norm;     /* fp32 [width], of each layer's channels */
    int64_t width;         /* channels of a layer; 0: the model has no such inputs */
    float projection_scale, embedding_scale, scale, eps;
};

/* Of one layer; without integers in `gate` it has none. */
struct layer_input {
    struct block_weights gate, projection; /* hidden -> width, width -> hidden */
    const float *norm;                     /* fp32 [hidden] */
    float eps;
};

/* Make a row's inputs, in place, of its outputs of the projection. */
static void finish_inputs(const struct layer_inputs *of, float *row, int64_t id, int32_t bf16) {
    const int64_t all = of->projection.outputs;
    for (int64_t from = 0; from < all; from += of->width) {
        float *y = row + from;
        floats squares[PIECES] = {0};
        FOR_LANES(i, p, of->width) {
            const floats x = load_floats(y + i) * splat(of->projection_scale);
            store_floats(y + i, x);
            squares[p] = fused(x, x, squares[p]);
        }
        const float inverse = 1.0f / sqrtf(sum16(squares) / (float)of->width + of->eps);
        for (int64_t i = 0; i < of->width; i += WIDTH) {
            const floats normed = load_floats(y + i) * splat(inverse) * load_floats(of->norm + i);
            const floats embedded = load_lanes(of->embedding, id * all + from + i, bf16);
            store_floats(y + i, fused(embedded, splat(of->embedding_scale), normed) * splat(of->scale));
        }
    }
}

#endif
