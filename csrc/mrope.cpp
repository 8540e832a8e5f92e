#include "mrope.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace omniload {
namespace {

struct Grid {
  std::int64_t time, height, width;  // tokens
};

Grid grid_of(const ImageRow& row, std::int64_t image) {
  const std::int64_t* patches = row.grids + 3 * image;
  return {patches[0], patches[1] / row.merge, patches[2] / row.merge};
}

[[noreturn]] void refuse(std::int64_t image, const std::string& rule) {
  throw std::invalid_argument("image " + std::to_string(image) + " of the row: " + rule);
}

// [start, end) must follow the image before, lie in one sample, and have the tokens of the grid.
void check_image(const ImageRow& row, std::int64_t image, std::int64_t last) {
  const std::int64_t* patches = row.grids + 3 * image;
  const std::int64_t start = row.spans[2 * image], end = row.spans[2 * image + 1];
  for (int axis = 0; axis < 3; ++axis) {
    // a span has below 2^31 tokens; so bounded, the product below can't overflow
    const std::int64_t unit = axis == 0 ? 1 : row.merge;
    if (patches[axis] < 1 || patches[axis] % unit != 0 || patches[axis] / unit > (1 << 20)) {
      refuse(image, "its grid must divide by merge=" + std::to_string(row.merge) + ", got (" +
                        std::to_string(patches[0]) + ", " + std::to_string(patches[1]) + ", " +
                        std::to_string(patches[2]) + ").");
    }
  }
  const Grid grid = grid_of(row, image);
  const std::int64_t tokens = grid.time * grid.height * grid.width;
  if (start < last || end - start != tokens) {
    refuse(image, "its span must follow the one before and have " + std::to_string(tokens) +
                      " tokens, got [" + std::to_string(start) + ", " + std::to_string(end) +
                      ").");
  }
  const std::int32_t* next =
      std::upper_bound(row.starts, row.starts + row.num_samples + 1, row.spans[2 * image]);
  if (next == row.starts + row.num_samples + 1 || end > *next) {
    refuse(image, "its span must lie in one sample, got [" + std::to_string(start) + ", " +
                      std::to_string(end) + ").");
  }
}

}  // namespace

void check_image_row(const ImageRow& row, std::int64_t num_tokens) {
  bool in_order = row.starts[0] == 0;
  for (std::int64_t i = 0; i < row.num_samples; ++i) {
    in_order = in_order && row.starts[i] <= row.starts[i + 1];
  }
  if (!in_order) throw std::invalid_argument("cu_seqlens must start with 0 and never fall.");
  if (row.starts[row.num_samples] != num_tokens) {
    throw std::invalid_argument("cu_seqlens must end with the number of tokens: expected " +
                                std::to_string(num_tokens) + ", got " +
                                std::to_string(row.starts[row.num_samples]) + ".");
  }
  for (std::int64_t image = 0; image < row.num_images; ++image) {
    check_image(row, image, image == 0 ? 0 : row.spans[2 * image - 1]);
  }
}

void mrope_position_ids(const ImageRow& row, std::int64_t num_tokens, std::int64_t* out) noexcept {
  std::int64_t* rows[3] = {out, out + num_tokens, out + 2 * num_tokens};
  std::int64_t image = 0;
  for (std::int64_t sample = 0; sample < row.num_samples; ++sample) {
    std::int64_t at = row.starts[sample];
    const std::int64_t end = row.starts[sample + 1];
    std::int64_t position = 0;
    while (at < end) {
      const bool has_image = image < row.num_images && row.spans[2 * image] < end;
      const std::int64_t text_end = has_image ? row.spans[2 * image] : end;
      for (; at < text_end; ++at, ++position) {
        for (std::int64_t* axis : rows) axis[at] = position;
      }
      if (!has_image) continue;
      const Grid grid = grid_of(row, image++);
      for (std::int64_t t = 0; t < grid.time; ++t) {
        for (std::int64_t y = 0; y < grid.height; ++y) {
          for (std::int64_t x = 0; x < grid.width; ++x, ++at) {
            rows[0][at] = position + t;
            rows[1][at] = position + y;
            rows[2][at] = position + x;
          }
        }
      }
      position += std::max({grid.time, grid.height, grid.width});
    }
  }
}

}  // namespace omniload
