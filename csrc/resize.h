// Resizing of 8-bit RGB images: bicubic, antialiased, in integers. Knows neither Python nor torch.
#pragma once

#include <cstdint>

namespace omniload {

// Whether this processor has the vector code that makes `resize` quick.
bool resize_is_quick() noexcept;

// Resizes `image`, uint8 (height, width, 3), to `columns` * `tile_width` by `rows` * `tile_height`
// pixels and writes the cells of that grid, uint8 (rows * columns, 3, tile_height, tile_width), row
// by row; or, where `planar` is false, the whole as uint8 (height, width, 3). All sides are at
// least 1. The arrays must not overlap.
//
// The bits are those of torch's `interpolate(mode="bicubic", antialias=True)` for uint8, and of
// Pillow-SIMD: rows first, rounded to 8 bits, then columns; weights of 16 bits. What lies between
// the two passes is as many rows as one row of the result needs, so memory does not grow with the
// height of the image. `use_vectors` false takes the portable code, with the same bits.
//
// Throws std::bad_alloc.
void resize(const std::uint8_t* image, std::int64_t height, std::int64_t width,
            std::int64_t columns, std::int64_t rows, std::int64_t tile_height,
            std::int64_t tile_width, bool planar, bool use_vectors, std::uint8_t* out);

}  // namespace omniload
