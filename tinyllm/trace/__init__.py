"""Looking inside a run: a prompt goes in, every stage of its way comes out as arrays, rows, or a page."""

from __future__ import annotations

from tinyllm.trace.record import Trace, trace

__all__ = ["Trace", "trace"]
