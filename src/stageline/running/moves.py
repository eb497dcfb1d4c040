"""Sends and receives: a value is handed to the transport, or announced to it."""

from __future__ import annotations

from stageline.running.state import StepState
from stageline.running.transports.base import Edge


def send_forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.endpoint.send(edge, state.departures.pop((stage, microbatch)))


def send_backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    packet = state.returns.pop((stage, microbatch))
    if packet is not None:  # else it has left in the middle of B
        state.endpoint.send(edge, packet)


def receive_forward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.arrivals[stage, microbatch] = state.endpoint.receive(edge)


def receive_backward(state: StepState, stage: int, microbatch: int, edge: Edge | None) -> None:
    assert edge is not None
    state.gradients[stage, microbatch] = state.endpoint.receive(edge)
