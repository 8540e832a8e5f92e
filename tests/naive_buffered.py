"""Slow references for the buffered grouping, in plain Python, written from the description."""

import math

PREFIXES, TRIES = 3, 4


def buffered(stream, *, budget, settings, bounds):
    """Groups of arrival numbers from a list of (tokens, tiles), as the packer makes them."""
    waiting, buffer, groups = list(enumerate(stream)), [], []
    while waiting or buffer:
        room = settings.buffer - len(buffer)
        buffer += waiting[:room]
        waiting = waiting[room:]
        group = keep_room(choose(buffer, budget, settings, bounds), budget, settings)
        groups.append([arrival for arrival, _ in group])
        buffer = [sample for sample in buffer if sample not in group]
    return groups


def choose(buffer, budget, settings, bounds):
    oldest, others = buffer[0], buffer[1:]
    lowest, best = math.inf, None
    for start in range(settings.retries):
        chain, skipped = [oldest], 0
        for sample in others[start:]:
            if skipped == settings.reach or len(chain) == budget.samples:
                break
            if fits([*chain, sample], budget):
                chain.append(sample)
            else:
                skipped += 1
        if score(chain, budget, settings) < lowest:
            lowest, best = score(chain, budget, settings), chain
        for dropped in range(min(PREFIXES, len(chain))):
            begun = chain[: len(chain) - dropped]
            if len(begun) == budget.samples or lowest == 0:
                continue
            for closed in closings(begun, buffer, budget, bounds):
                if score(closed, budget, settings) < lowest:
                    lowest, best = score(closed, budget, settings), closed
        if lowest == 0:
            break
    return best


def closings(begun, buffer, budget, bounds):
    """One group a tile class, the class of the most tiles first."""
    for number in reversed(range(len(bounds))):
        least = bounds[number - 1] + 1 if number else 0
        tokens, tiles = sums(begun)
        if budget.tiles is not None and least > budget.tiles - tiles:
            continue
        candidates = [
            sample
            for sample in buffer
            if sample not in begun
            and tokens + sample[1][0] <= budget.tokens
            and (budget.tiles is None or least <= sample[1][1] <= bounds[number])
        ]
        candidates.sort(key=lambda sample: (-sample[1][0], sample[0]))
        for sample in candidates[:TRIES]:
            if fits([*begun, sample], budget):
                yield [*begun, sample]
                break


def keep_room(group, budget, settings):
    tokens, tiles = sums(group)
    has_tiles = budget.tiles is not None and tiles > 0
    while not has_tiles and len(group) > 1 and tokens + settings.dummy_tokens > budget.tokens:
        group = group[:-1]
        tokens, _ = sums(group)
    return group


def sums(group):
    return sum(sizes[0] for _, sizes in group), sum(sizes[1] for _, sizes in group)


def fits(group, budget):
    tokens, tiles = sums(group)
    return tokens <= budget.tokens and (budget.tiles is None or tiles <= budget.tiles)


def score(group, budget, settings):
    unit = 2**40
    tokens, tiles = sums(group)
    first = (budget.tokens - tokens) * (unit // budget.tokens)
    second = (budget.tiles - tiles) * (unit // budget.tiles) if budget.tiles else 0
    return (64 * min(first, second) + settings.slack_weight * max(first, second)) // 64
