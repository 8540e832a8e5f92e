// Tiles: an image turned upright, cut into the cells of a grid, its values looked up in a table.
// Knows neither Python nor torch.
#pragma once

#include <cstdint>

namespace omniload {

// Cuts `image`, uint8 (rows * height, columns * width, 3), into uint8
// (rows * columns, 3, height, width), row by row. The arrays must not overlap.
void image_to_tiles(const std::uint8_t* image, std::int64_t columns, std::int64_t rows,
                    std::int64_t height, std::int64_t width, std::uint8_t* out) noexcept;

// Writes row `y` of such an image, uint8 (columns * width, 3), to its place in `out`.
void row_to_tiles(const std::uint8_t* line, std::int64_t columns, std::int64_t y,
                  std::int64_t height, std::int64_t width, std::uint8_t* out) noexcept;

// Applies an EXIF orientation, 1 to 8, to `image`, uint8 (height, width, 3). `out` has the same
// number of pixels, with the sides exchanged from orientation 5 on. The arrays must not overlap.
void turn_upright(const std::uint8_t* image, std::int64_t height, std::int64_t width,
                  int orientation, std::uint8_t* out) noexcept;

// Looks up each value of `tiles`, uint8 (num_tiles, 3, plane), in the 256 values of its channel.
// T is any type of the size of an element: values are moved, not computed with.
template <typename T>
void normalize(const std::uint8_t* tiles, std::int64_t num_tiles, std::int64_t plane,
               const T* table, T* out) noexcept;

}  // namespace omniload
