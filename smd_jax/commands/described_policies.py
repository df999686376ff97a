"""Eviction policies that the command line describes by a file or by ids of tokens.

--eviction 'triattention(centers="centers.npz")'                    a file of `QueryCenters.save`
--eviction 'on_tokens(open=151670, close=151671, inner="snapkv")'   ids of tokens; inner: what evicts for the budget
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.named import POLICIES
from smd_jax.eviction.triattention import TriAttention
from smd_jax.eviction.wrappers import OnTokens
from smd_jax.message.query_centers import load_query_centers
from smd_jax.message.spans import TokenSpans
from smd_jax.model.protocol import ModelShape

_CENTERS = re.compile(r"(?P<before>\(.*\bcenters\s*=\s*)(?P<quote>[\"'])(?P<path>.+?)(?P=quote)", re.DOTALL)


@dataclass(frozen=True)
class CentersFile:
    """The parameters of TriAttention, with its query centers in a file."""

    centers: str
    longest: int = 65536

    def policy(self) -> EvictionPolicy:
        """Reads the file; raises as `load_query_centers`."""
        return TriAttention(load_query_centers(Path(self.centers).expanduser()), longest=self.longest)


@dataclass(frozen=True)
class SpanTokens:
    """The parameters of OnTokens: ids of tokens, and the name of the inner policy with its defaults."""

    open: int
    close: int
    summary: tuple[int, int] | None = None
    delimiters: bool = False
    inner: str = "dense"

    def policy(self) -> EvictionPolicy:
        """The policy; raises ValueError for an unknown inner policy, TypeError and ValueError as `TokenSpans`."""
        if self.inner not in POLICIES:
            raise ValueError(f"expected inner as one of {', '.join(POLICIES)}; got {self.inner!r}")
        spans = TokenSpans(self.open, self.close, self.summary, self.delimiters)
        return OnTokens(spans, inner=POLICIES[self.inner])


Described = CentersFile | SpanTokens
DESCRIBED: Mapping[str, type[Described]] = {"on_tokens": SpanTokens, "triattention": CentersFile}


def with_full_path(text: str) -> str:
    """The text of a policy whose file of query centers has an absolute path; any other text is returned unchanged."""

    def full(match: re.Match[str]) -> str:
        quote = match["quote"]
        return f"{match['before']}{quote}{Path(match['path']).expanduser().resolve()}{quote}"

    return _CENTERS.sub(full, text) if text.strip().lower().startswith("triattention") else text


def check_centers(policy: EvictionPolicy, shape: ModelShape) -> None:
    """Raises ValueError for TriAttention with the query centers of another model."""
    if not isinstance(policy, TriAttention):
        return
    wanted, found = (shape.num_layers, shape.num_heads, shape.head_dim // 2), policy.centers.mean.shape
    if found != wanted:
        raise ValueError(f"expected query centers [layers, heads, head_dim / 2] {list(wanted)}; got {list(found)}")
