/* What codes of 4 bits stand for, in the order of the codes: 16 numbers, each with `above` added.
 *
 * Invariant: with 0 they are signed bytes. Not responsible for: the scale that a number is multiplied by.
 */
#ifndef LOCKSTEP_CODES_H
#define LOCKSTEP_CODES_H

/* Twice the value of a float of 4 bits (e2m1), as in MXFP4. */
#define TWICE_E2M1(above)                                                                                              \
    {above,     above + 1, above + 2, above + 3, above + 4, above + 6, above + 8, above + 12,                          \
     above - 0, above - 1, above - 2, above - 3, above - 4, above - 6, above - 8, above - 12}

/* The levels of IQ4_NL and IQ4_XS. */
#define IQ4_LEVELS(above)                                                                                              \
    {above - 127, above - 104, above - 83, above - 65, above - 49, above - 35, above - 22, above - 10,                 \
     above + 1,   above + 13,  above + 25, above + 38, above + 53, above + 69, above + 89, above + 113}

#endif
