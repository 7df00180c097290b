/* Lays the blocks of a matrix, as a file has them, out for the products of blocks.h.
 *
 * A source is a place in memory and two strides, in bytes: from row to row and from block to block. So a file's blocks are
 * read where they lie, whatever stands between them. Four bytes of quants are a word, and the word of an output is a lane:
 * packing moves words and half-precision numbers, and computes nothing but one exclusive or. The integers of 4 bits lie as
 * in GGUF's Q4_0: input j in the low half of byte j, input j + 16 in the high half. 5 and 6 bits lie as in their
 * words (see block_weights in blocks.h).
 *
 * Invariant: outputs of a group that the matrix does not have get zeros, whose bytes are `flip`. Not responsible for: the
 * memory of either side, or the meaning of the numbers.
 */
#include <stdint.h>
#include <string.h>

enum { PACK_LANES = 16, PACK_GROUP = 32 };

struct block_source {
    const uint8_t *first; /* of row 0; null: the matrix has none */
    int64_t row_bytes, block_bytes;
};

struct pack_args {
    struct block_source quants, scales, offsets;
    const int64_t *order;  /* [rows], the source's row of each output; null: the same row */
    uint32_t *out_quants;  /* [ceil(rows / 32)][blocks][2][words][16] */
    uint16_t *out_scales;  /* [ceil(rows / 32)][blocks][parts][2][16] */
    uint16_t *out_offsets; /* [ceil(rows / 32)][blocks][2][16] */
    int64_t rows, blocks;
    int64_t words, parts; /* of a block: 4 to 6 with as many bits, 8 with 8 bits; its scales */
    uint32_t flip;
};

static const uint8_t *row_of(const struct block_source *s, const struct pack_args *a, int64_t row) {
    return s->first + (a->order ? a->order[row] : row) * s->row_bytes;
}

static void pack_halves(const struct pack_args *a, const struct block_source *s, int64_t group, int64_t count,
                        uint16_t *out) {
    const int64_t left = a->rows - group * PACK_GROUP, rows = left < PACK_GROUP ? left : PACK_GROUP;
    const uint8_t *from[PACK_GROUP];
    for (int64_t r = 0; r < rows; r++) from[r] = row_of(s, a, group * PACK_GROUP + r);
    for (int64_t b = 0; b < count; b++, out += PACK_GROUP)
        for (int64_t r = 0; r < PACK_GROUP; r++)
            if (r < rows)
                memcpy(out + r, from[r] + b * s->block_bytes, sizeof *out);
            else
                out[r] = 0;
}

static void pack_quants(const struct pack_args *a, int64_t group, uint32_t *out) {
    const int64_t left = a->rows - group * PACK_GROUP, rows = left < PACK_GROUP ? left : PACK_GROUP;
    const uint8_t *from[PACK_GROUP];
    for (int64_t r = 0; r < rows; r++) from[r] = row_of(&a->quants, a, group * PACK_GROUP + r);
    for (int64_t b = 0; b < a->blocks; b++)
        for (int64_t half = 0; half < PACK_GROUP; half += PACK_LANES, out += a->words * PACK_LANES)
            for (int64_t lane = 0; lane < PACK_LANES; lane++) {
                uint32_t block[8] = {0};
                if (half + lane < rows)
                    memcpy(block, from[half + lane] + b * a->quants.block_bytes, (size_t)a->words * sizeof *block);
                for (int64_t w = 0; w < a->words; w++) out[w * PACK_LANES + lane] = block[w] ^ a->flip;
            }
}

void lockstep_pack_blocks(const struct pack_args *a) {
    const int64_t groups = (a->rows + PACK_GROUP - 1) / PACK_GROUP, halves = a->blocks * PACK_GROUP;
    for (int64_t g = 0; g < groups; g++) {
        pack_quants(a, g, a->out_quants + g * halves * a->words);
        pack_halves(a, &a->scales, g, a->blocks * a->parts, a->out_scales + g * halves * a->parts);
        if (a->offsets.first) pack_halves(a, &a->offsets, g, a->blocks, a->out_offsets + g * halves);
    }
}
