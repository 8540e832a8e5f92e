"""Lengths as hypothesis draws them: a budget, and rows that fit it alone."""

import numpy as np
from hypothesis import strategies as st

from omniload.types import Budget


@st.composite
def budgets(draw):
    tokens = draw(st.sampled_from([1, 7, 64, 200, 4096, 2**31 - 1]))
    tiles = draw(st.sampled_from([None, 0, 1, 5, 13]))
    samples = draw(st.sampled_from([None, None, 1, 3]))
    return Budget(tokens=tokens, tiles=tiles, samples=samples)


@st.composite
def problems(draw, max_rows=60):
    """(budget, num_tokens int32, num_tiles int32): often few distinct lengths, often at a bound."""
    budget = draw(budgets())
    most = 9 if budget.tiles is None else budget.tiles
    tokens = st.one_of(
        st.integers(1, budget.tokens),
        st.sampled_from([1, budget.tokens, max(1, budget.tokens // 2), max(1, budget.tokens // 3)]),
    )
    rows = draw(st.lists(st.tuples(tokens, st.integers(0, most)), max_size=max_rows))
    columns = np.array(rows, np.int32).reshape(-1, 2)
    return budget, columns[:, 0].copy(), columns[:, 1].copy()


def listed(groups):
    return [group.tolist() for group in groups]
