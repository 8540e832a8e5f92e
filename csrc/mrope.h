// M-RoPE: positions of a packed row in time, height and width. Knows neither Python nor torch.
#pragma once

#include <cstdint>

namespace omniload {

// A packed row and the images in it. `starts` has num_samples + 1 places, `spans` 2 and `grids` 3
// numbers an image: [start, end) in the row; patches in time, height and width.
struct ImageRow {
  const std::int32_t* starts;
  std::int64_t num_samples;
  const std::int32_t* spans;
  const std::int64_t* grids;
  std::int64_t num_images;
  std::int64_t merge;
};

// Throws std::invalid_argument unless samples and images lie in order, each image inside one sample
// and as long as its grid says, and the row has `num_tokens` tokens.
void check_image_row(const ImageRow& row, std::int64_t num_tokens);

// Writes time, height and width, num_tokens each, to `out`. The row must have been checked.
void mrope_position_ids(const ImageRow& row, std::int64_t num_tokens, std::int64_t* out) noexcept;

}  // namespace omniload
