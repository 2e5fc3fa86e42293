"""A report as points on TensorBoard's curves, beside those of the training that made the drafter."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from eval.report import Report


def curve_points(report: Report, simulated: float | None) -> dict[str, float]:
    """Tag -> value, at the report's own temperature; `simulated` is training's acceptance length.

    Depths and gap are the chain's.
    """
    points = {"accept_real/chain": report.chain.acceptance_length}
    for depth, share in enumerate(report.chain.accepted_by_depth, start=1):
        points[f"accept_real/depth_{depth}"] = share
    if report.tree is not None:
        points["accept_real/tree"] = report.tree.acceptance_length
    if simulated is not None:
        points["accept_gap"] = simulated - report.chain.acceptance_length
    points["time/measure_s"] = sum(report.seconds.values())
    return points


def write_curves(directory: Path, step: int, points: Mapping[str, float]) -> None:
    """Appends one point per tag in a new event file, which TensorBoard merges with the run's others.

    tensorboard's own writer, so that measuring needs no torch.
    """
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
    writer = EventFileWriter(str(directory))
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
    writer.close()
