"""Rows for the tests of masks, and what a mask is, written down as slowly as it is meant."""

import itertools

import torch
from hypothesis import strategies as st

# documents of 1 token, at the edges of blocks of 4, 8 and 16, and in between
LENGTHS = st.one_of(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 32]), st.integers(1, 50))


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def spans_of(pairs):
    return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)


@st.composite
def rows(draw, lengths=LENGTHS, max_documents=6):
    """Return cu_seqlens and the settings of a mask, as keyword arguments."""
    cu_seqlens = offsets(draw(st.lists(lengths, min_size=1, max_size=max_documents)))
    kind = draw(st.sampled_from(["causal", "full", "prefix"]))
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    image_spans = None
    if kind == "prefix":
        image_spans = spans_of(draw(_images(cu_seqlens.tolist())))
    return cu_seqlens, {"kind": kind, "image_spans": image_spans, "window": window}


@st.composite
def _images(draw, bounds):
    spans = []
    for start, end in itertools.pairwise(bounds):
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=4)))
        spans += [list(pair) for pair in zip(cuts[::2], cuts[1::2], strict=False)]
    return spans


def naive_dense(cu_seqlens, kind, image_spans, window):
    """Bool (num_tokens, num_tokens): the definition, token by token."""
    bounds = cu_seqlens.tolist()
    images = [] if image_spans is None else image_spans.tolist()
    found = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for start, end in itertools.pairwise(bounds):
        for query in range(start, end):
            for key in range(start, end):
                near = window is None or abs(query - key) < window
                after = key <= query or kind == "full"
                same_image = any(a <= query < b and a <= key < b for a, b in images)
                found[query, key] = (near and after) or same_image
    return found
