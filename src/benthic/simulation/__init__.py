"""Replays a recorded trace through the cache core: its own decisions, with simulated copies, disk and compute."""

from benthic.simulation.replay import replay
from benthic.simulation.report import Report
from benthic.simulation.setup import Setup
from benthic.simulation.trace import Trace, TraceRequest, read_trace

__all__ = ["Report", "Setup", "Trace", "TraceRequest", "read_trace", "replay"]
