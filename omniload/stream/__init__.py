"""Streams without an index: samples grouped, packed and dealt out as they come.

loader = StreamLoader(open_part, budget=Budget(tokens=4096, tiles=16), transform=transform)
for batch in loader:
    ...

What a stream can't promise, and `omniload.DataLoader` over shards or indexed tars can: it is not
resumed; the order depends on the number of ranks and workers; lengths are known of the buffer only,
so groups are a little less full, ranks are not balanced, and the number of steps is not known
beforehand. What still holds: no sample is lost or comes twice, all ranks take the same number of
steps, and the denominators of each step are exact.
"""

from __future__ import annotations

from omniload.stream.loader import StreamCounts, StreamLoader
from omniload.stream.packer import pack_stream
from omniload.stream.settings import StreamPart, StreamSettings

__all__ = ["StreamCounts", "StreamLoader", "StreamPart", "StreamSettings", "pack_stream"]
