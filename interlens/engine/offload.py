"""Moving captured activations to the host: batched, pinned, on a side stream, overlapping the next steps.

On CUDA, `move` concatenates a batch of tensors on the device, copies it into a pinned staging buffer on a side stream
and returns claims at once; whoever needs the rows waits for that copy alone. Staging is double-buffered and of bounded size:
a buffer is reused when its earlier copy has been drained into ordinary memory. On a CPU the plain path is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
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
        """Make the side stream wait for what the compute stream has queued."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy on the side stream; returns an event."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._side)
            event = torch.cuda.Event()
            event.record()
        return event

    def wait(self, event: Any) -> None:
        """Block the host until the event has passed."""
        event.synchronize()


class Claim:
    """Somebody's rows of a batch that was moved. Once here they are storage of their own: nobody's rows keep another's
    alive."""

    def __init__(self, index: np.ndarray, row_bytes: int):
        self._index = index
        self._value: Tensor | None = None
        self.transfer: Transfer | None = None
        """What they wait for."""
        self.num_bytes = len(index) * row_bytes

    def take(self, batch: Tensor) -> None:
        """Copy the rows out of the batch."""
        self._value, self.transfer = batch[torch.from_numpy(self._index)], None

    def rows(self) -> Tensor:
        """The rows `[n, W]`, waited for if need be."""
        if self.transfer is not None:
            self.transfer.settle()
        assert self._value is not None
        return self._value


class Transfer:
    """A batch on its way to the host, in one of the mover's staging buffers."""

    def __init__(self, mover: Mover, buffer: int, batch: Tensor, event: Any, claims: Sequence[Claim]):
        self._mover, self._buffer, self._batch, self._event, self._claims = mover, buffer, batch, event, claims
        for claim in claims:
            claim.transfer = self

    def settle(self) -> None:
        """Wait for the copy, give every claim its rows, and free the buffer."""
        self._mover.streams.wait(self._event)
        for claim in self._claims:
            claim.take(self._batch)
        self._mover.release(self._buffer)


class Mover:
    """Moves batches of same-width tensors. One per engine."""

    def __init__(self, device: torch.device, buffer_bytes: int = 64 << 20, streams: Streams | None = None):
        self.device = device
        self.asynchronous = streams is not None or device.type == "cuda"
        self.streams: Any = streams or (CudaStreams(device) if device.type == "cuda" else None)
        self._bytes = buffer_bytes
        self._buffers: list[Tensor | None] = [None, None]
        self._users: list[Transfer | None] = [None, None]
        self._next = 0
        self.bytes_moved = 0

    def move(self, parts: list[Tensor], offload: str | None, shares: Sequence[np.ndarray]) -> list[Claim]:
        """Concatenate along rows and move to `offload` ("cpu", or None: stay on the device).

        One claim per share, an index into the rows. Claims never alias `parts`.
        """
        batch = torch.cat(parts) if len(parts) > 1 else parts[0]
        self.bytes_moved += batch.nbytes
        claims = [Claim(share, batch[0].nbytes) for share in shares]
        plain = offload is None or not self.asynchronous
        if plain or batch.nbytes > self._bytes or (batch.device.type == "cuda" and batch.device != self.device):
            here = batch if plain else batch.cpu()
            for claim in claims:
                claim.take(here)
            return claims
        buffer = self._next
        self._next = 1 - self._next
        user = self._users[buffer]
        if user is not None:
            user.settle()
        staging = self._buffers[buffer]
        if staging is None:
            pinned = self.device.type == "cuda"
            staging = self._buffers[buffer] = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=pinned)
        target = staging[: batch.nbytes].view(batch.dtype).view(batch.shape)
        self.streams.fork()
        event = self.streams.copy(target, batch)
        self._users[buffer] = Transfer(self, buffer, target, event, claims)
        return claims

    def release(self, buffer: int) -> None:
        """A buffer's rows have been taken out."""
        self._users[buffer] = None
