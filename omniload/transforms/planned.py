"""The tiling policy that one stored image was planned with, checked against what was stored."""

from __future__ import annotations

from collections.abc import Mapping

from omniload.errors import ConfigError, SampleError
from omniload.images import TilePolicy, TokenPolicy, count_tokens

__all__ = ["check_source_policies", "planned_policy"]


def planned_policy(
    policy: TilePolicy,
    width: int,
    height: int,
    *,
    num_tiles: int,
    num_tokens: int,
    tokens_per_tile: int,
    fewer_tiles: bool,
) -> TilePolicy:
    """Find the policy that an image was planned with.

    Args:
        policy: that of its data set.
        width: of the image, pixels.
        height: of the image, pixels.
        num_tiles: stored.
        num_tokens: stored.
        tokens_per_tile: for a policy that leaves the tokens to the number of tiles.
        fewer_tiles: whether preprocessing may have lowered the limit for this image.

    Returns:
        `policy`, or the same with a lower limit.

    Raises:
        SampleError: it doesn't give the tiles or the tokens that are stored; shows both.
    """
    realised = policy.num_tiles(width, height)
    if realised != num_tiles:
        if not fewer_tiles:
            raise SampleError(
                f"its tiles must be those that the length index counted: expected {num_tiles}, "
                f"got {realised} with {policy}."
            )
        policy = policy.for_num_tiles(width, height, num_tiles)
    expected = count_tokens(policy, width, height, tokens_per_tile=tokens_per_tile)
    if num_tokens != expected:
        by_policy = isinstance(policy, TokenPolicy)
        rule = "what the policy says" if by_policy else f"{tokens_per_tile} a tile"
        raise SampleError(
            f"its tokens must be {rule}: expected {expected} for {num_tiles} tiles, got "
            f"{num_tokens}."
        )
    return policy


def check_source_policies(
    policy: TilePolicy, others: Mapping[str, TilePolicy]
) -> dict[str, TilePolicy]:
    """Check that the tiles of all data sets can lie in one batch.

    Raises:
        ConfigError: another kind or size of tiles.
    """
    for name, other in others.items():
        if type(other) is not type(policy) or other.size != policy.size:
            raise ConfigError(
                f"all data sets must have tiles of one kind and size: expected those of {policy}, "
                f"got {other} for {name!r}."
            )
    return dict(others)
