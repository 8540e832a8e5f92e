#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace omniload {
namespace {

OMNILOAD_VECTORS void split_channels(const std::uint8_t* pixels, std::int64_t width,
                                     std::uint8_t* red, std::uint8_t* green, std::uint8_t* blue) {
  for (std::int64_t x = 0; x < width; ++x) {
    red[x] = pixels[3 * x];
    green[x] = pixels[3 * x + 1];
    blue[x] = pixels[3 * x + 2];
  }
}

constexpr std::int64_t kPixel = 3;  // bytes
// Pixels a side of a block of a transposed copy: its rows and its columns stay in the first cache.
constexpr std::int64_t kBlock = 32;

// Where the pixel (y, x) of the turned image lies in the given one: base + y * down + x * right.
struct Walk {
  const std::uint8_t* base;
  std::int64_t down;
  std::int64_t right;
};

void copy_block(const Walk& from, std::int64_t top, std::int64_t bottom, std::int64_t left,
                std::int64_t right, std::int64_t width, std::uint8_t* out) {
  for (std::int64_t y = top; y < bottom; ++y) {
    const std::uint8_t* line = from.base + y * from.down;
    std::uint8_t* target = out + y * width * kPixel;
    for (std::int64_t x = left; x < right; ++x) {
      std::memcpy(target + x * kPixel, line + x * from.right, kPixel);
    }
  }
}

}  // namespace

void turn_upright(const std::uint8_t* image, std::int64_t height, std::int64_t width,
                  int orientation, std::uint8_t* out) noexcept {
  if (height == 0 || width == 0) return;
  Walk from{image, width * kPixel, kPixel};
  if (orientation >= 5) {
    std::swap(from.down, from.right);
    std::swap(height, width);
  }
  if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8) {
    from.base += (height - 1) * from.down;
    from.down = -from.down;
  }
  if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7) {
    from.base += (width - 1) * from.right;
    from.right = -from.right;
  }
  if (orientation == 1 || orientation == 4) {
    for (std::int64_t y = 0; y < height; ++y) {
      std::memcpy(out + y * width * kPixel, from.base + y * from.down,
                  static_cast<std::size_t>(width * kPixel));
    }
    return;
  }
  // lines that stay lines are read in order, from end to end
  const std::int64_t block_width = orientation < 5 ? width : kBlock;
  for (std::int64_t top = 0; top < height; top += kBlock) {
    const std::int64_t bottom = std::min(top + kBlock, height);
    for (std::int64_t left = 0; left < width; left += block_width) {
      copy_block(from, top, bottom, left, std::min(left + block_width, width), width, out);
    }
  }
}

template <typename T>
void normalize(const std::uint8_t* tiles, std::int64_t num_tiles, std::int64_t plane,
               const T* table, T* out) noexcept {
  for (std::int64_t i = 0; i < 3 * num_tiles; ++i) {
    const T* values = table + 256 * (i % 3);
    for (std::int64_t x = 0; x < plane; ++x) out[x] = values[tiles[x]];
    tiles += plane;
    out += plane;
  }
}

template void normalize(const std::uint8_t*, std::int64_t, std::int64_t, const std::int16_t*,
                        std::int16_t*) noexcept;
template void normalize(const std::uint8_t*, std::int64_t, std::int64_t, const std::int32_t*,
                        std::int32_t*) noexcept;
template void normalize(const std::uint8_t*, std::int64_t, std::int64_t, const std::int64_t*,
                        std::int64_t*) noexcept;

void row_to_tiles(const std::uint8_t* line, std::int64_t columns, std::int64_t y,
                  std::int64_t height, std::int64_t width, std::uint8_t* out) noexcept {
  const std::int64_t plane = height * width;
  std::uint8_t* target = out + (y / height) * columns * 3 * plane + (y % height) * width;
  for (std::int64_t column = 0; column < columns; ++column) {
    split_channels(line + column * width * 3, width, target, target + plane, target + 2 * plane);
    target += 3 * plane;
  }
}

void image_to_tiles(const std::uint8_t* image, std::int64_t columns, std::int64_t rows,
                    std::int64_t height, std::int64_t width, std::uint8_t* out) noexcept {
  // image row by image row, so that the source is read once and in order
  for (std::int64_t y = 0; y < rows * height; ++y) {
    row_to_tiles(image + y * columns * width * 3, columns, y, height, width, out);
  }
}

}  // namespace omniload
