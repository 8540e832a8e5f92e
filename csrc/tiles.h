// Tiles: one image cut into the cells of a grid. Knows neither Python nor torch.
#pragma once

#include <cstdint>

namespace omniload {

// Cuts `image`, uint8 (rows * height, columns * width, 3), into uint8
// (rows * columns, 3, height, width), row by row. The arrays must not overlap.
void image_to_tiles(const std::uint8_t* image, std::int64_t columns, std::int64_t rows,
                    std::int64_t height, std::int64_t width, std::uint8_t* out) noexcept;

}  // namespace omniload
