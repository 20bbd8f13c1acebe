/* The 16-entry codebook of KTC_SCALE_CODEBOOK (abi.h) and the multipliers that its selectors stand for.
 *
 * One codebook, eight multipliers and a sign give 16 sets of 16 levels. Both were fitted to normally
 * distributed groups of 16 (alternating least squares, then rounded). The levels are not symmetric, so that
 * the sign chooses the side with the longer reach for the largest weight of a group; the smallest multiplier
 * is for rows whose groups differ much in size. This header is part of the format: a change is a new scale
 * mode.
 */
#ifndef KTC_CODEBOOK_H
#define KTC_CODEBOOK_H

#include <stdint.h>

namespace ktc {

constexpr int8_t kCodebook[16] = {-127, -92, -74, -58, -45, -33, -21, -10, 0, 11, 22, 34, 48, 62, 79, 98};
constexpr uint8_t kCodebookMult[8] = {26, 58, 69, 79, 89, 100, 111, 127}; /* in units of 1 / 128 */
constexpr int kCodebookZero = 8;                                          /* the nibble of level 0 */

/* The level, in [-126, 126], of nibble `code` under `selector` (both 0..15). */
constexpr int codebook_level(int selector, int code) {
  const int level = (kCodebook[code] * kCodebookMult[selector & 7] + 64) >> 7; /* arithmetic shift: floor */
  return selector & 8 ? -level : level;
}

/* level + 128 by selector and nibble: what a kernel multiplies with. */
struct CodebookBytes {
  alignas(64) uint8_t at[16][16];
};
constexpr CodebookBytes codebook_bytes() {
  CodebookBytes t{};
  for (int s = 0; s < 16; ++s)
    for (int c = 0; c < 16; ++c) t.at[s][c] = uint8_t(codebook_level(s, c) + 128);
  return t;
}

}  // namespace ktc
#endif  // KTC_CODEBOOK_H
