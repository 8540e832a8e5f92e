#include "tiles.h"

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

}  // namespace

void image_to_tiles(const std::uint8_t* image, std::int64_t columns, std::int64_t rows,
                    std::int64_t height, std::int64_t width, std::uint8_t* out) noexcept {
  const std::int64_t plane = height * width;
  // image row by image row, so that the source is read once and in order
  for (std::int64_t y = 0; y < rows * height; ++y) {
    const std::uint8_t* line = image + y * columns * width * 3;
    std::uint8_t* target = out + (y / height) * columns * 3 * plane + (y % height) * width;
    for (std::int64_t column = 0; column < columns; ++column) {
      split_channels(line + column * width * 3, width, target, target + plane, target + 2 * plane);
      target += 3 * plane;
    }
  }
}

}  // namespace omniload
