"""Slow references in plain Python, written from the description and not from the fast code."""

from omniload import rng


def shuffled(items, *key):
    """Fisher-Yates from the last place down; place i is swapped with a random place <= i."""
    words = [int(word) for word in rng.random_u64(len(items), *key)]
    items = list(items)
    for place in reversed(range(1, len(items))):
        other = (words[place] // 2**32) * (place + 1) // 2**32
        items[place], items[other] = items[other], items[place]
    return items


def next_fit(order, num_tokens, num_tiles, budget):
    """Walk rows in order; the one that would pass a bound opens the next group."""
    groups = []
    for row in order:
        joined = [*groups[-1], row] if groups else None
        if joined and fits(joined, num_tokens, num_tiles, budget):
            groups[-1] = joined
        else:
            groups.append([row])
    return groups


def fits(rows, num_tokens, num_tiles, budget):
    return (
        total(rows, num_tokens) <= budget.tokens
        and (budget.tiles is None or total(rows, num_tiles) <= budget.tiles)
        and (budget.samples is None or len(rows) <= budget.samples)
    )


def total(rows, column):
    return sum(int(column[row]) for row in rows)


def isf(num_tokens, num_tiles, *, budget, key, rounds=50, token_floor=None, tile_floor=None):
    """Iterative sampling and filtering; the groups in emission order."""
    if token_floor is None:
        token_floor = max(0, budget.tokens - 128)
    if tile_floor is None:
        tile_floor = budget.tiles if budget.tiles else float("inf")
    left, kept = list(range(len(num_tokens))), []
    for turn in range(rounds):
        groups = next_fit(shuffled(left, *key, 1, turn), num_tokens, num_tiles, budget)
        full = [
            total(group, num_tokens) >= token_floor
            or total(group, num_tiles) >= tile_floor
            or len(group) == budget.samples
            for group in groups
        ]
        kept += [group for group, stays in zip(groups, full, strict=True) if stays]
        left = [
            row for group, stays in zip(groups, full, strict=True) if not stays for row in group
        ]
    kept += next_fit(shuffled(left, *key, 1, rounds), num_tokens, num_tiles, budget)
    return [kept[group] for group in rng.permutation(len(kept), *key, 2).tolist()]
