"""Moving captured activations to the host: batched, pinned, on a side stream, overlapping the next steps.

On CUDA, `move` concatenates a batch of tensors on the device, copies it into a pinned staging buffer on a side stream
and returns at once; whoever needs the rows waits for that copy alone. Staging is double-buffered and of bounded size:
a buffer is reused when its earlier copy has been drained into ordinary memory. On a CPU the plain path is one copy.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Streams(Protocol):
    """The few stream operations used, so that their order can be recorded in a test."""

    def fork(self) -> None:
        """Make the side stream wait for what the compute stream has queued."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy on the side stream; returns an event."""
        ...

    def wait(self, event: Any) -> None:
        """Block the host until the event has passed."""
        ...


class CudaStreams:
    """Streams of one CUDA device."""

    def __init__(self, device: torch.device):
        self._side = torch.cuda.Stream(device)
        self._device = device

    def fork(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> Any:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._side)
            event = torch.cuda.Event()
            event.record()
        return event

    def wait(self, event: Any) -> None:
        event.synchronize()


class Moved:
    """Rows on their way to the host, or already there."""

    def __init__(self, value: Tensor, mover: Mover | None = None, buffer: int = -1, event: Any = None):
        self._value = value
        self._mover = mover
        self._buffer = buffer
        self._event = event
        self.row_bytes = value.shape[-1] * value.element_size()

    def settle(self) -> None:
        """Wait for the copy and take the rows out of the staging buffer."""
        if self._mover is not None:
            self._mover.streams.wait(self._event)
            self._value = self._value.clone()
            self._mover.release(self._buffer, self)
            self._mover = self._event = None

    def rows(self, index: np.ndarray | None) -> Tensor:
        """A compact copy of these rows (None: all), in ordinary memory."""
        self.settle()
        return self._value if index is None else self._value[torch.from_numpy(index)]


class Mover:
    """Moves batches of same-width tensors. One per engine."""

    def __init__(self, device: torch.device, buffer_bytes: int = 64 << 20, streams: Streams | None = None):
        self.device = device
        self.asynchronous = streams is not None or device.type == "cuda"
        self.streams: Any = streams or (CudaStreams(device) if device.type == "cuda" else None)
        self._bytes = buffer_bytes
        self._buffers: list[Tensor | None] = [None, None]
        self._users: list[Moved | None] = [None, None]
        self._next = 0
        self.bytes_moved = 0

    def move(self, parts: list[Tensor], offload: str | None) -> Moved:
        """Concatenate along rows and move to `offload` ("cpu", or None: stay on the device). Never aliases `parts`."""
        value = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        self.bytes_moved += value.numel() * value.element_size()
        if offload is None or not self.asynchronous:
            return Moved(value)
        size = value.numel() * value.element_size()
        if size > self._bytes or (value.device.type == "cuda" and value.device != self.device):
            return Moved(value.cpu())
        buffer = self._next
        self._next = 1 - self._next
        user = self._users[buffer]
        if user is not None:
            user.settle()
        staging = self._buffers[buffer]
        if staging is None:
            pinned = self.device.type == "cuda"
            staging = self._buffers[buffer] = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=pinned)
        target = staging[:size].view(value.dtype).view(value.shape)
        self.streams.fork()
        event = self.streams.copy(target, value)
        moved = self._users[buffer] = Moved(target, self, buffer, event)
        return moved

    def release(self, buffer: int, moved: Moved) -> None:
        """A buffer's rows have been taken out."""
        if self._users[buffer] is moved:
            self._users[buffer] = None
