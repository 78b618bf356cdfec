"""Captures graphs of kernels on an accelerator that has them. Worker processes only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from inferpool.models.accelerator.device import module_in_use


class GraphPool:
    """Memory for the graphs of one network; one of them is replayed at a time."""

    def __init__(self) -> None:
        self._module = module_in_use()
        assert self._module is not None, "the network is on a device"
        self._pool = self._module.graph_pool_handle()

    @contextmanager
    def captured(self) -> Iterator[Any]:
        """Capture all work that this thread queues in the block; yield the graph.

        Another thread may go on using the device: its calls do not spoil the capture. If the
        capture fails, the device may be used as before, unless its context is lost.
        """
        module = self._module
        before = module.current_stream()
        graph = module.CUDAGraph()
        spoilt_by: BaseException | None = None
        try:
            with module.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    yield graph
                except BaseException as error:
                    spoilt_by = error
                    raise
            return
        except BaseException:
            module.set_stream(before)  # torch 2.11 leaves the one of the capture
            self._forget_capture(before.device)
            if spoilt_by is None:
                raise
        # The end of a spoilt capture fails too, and says no more than that it was spoilt.
        try:
            raise spoilt_by
        finally:
            spoilt_by = None  # its traceback holds this frame, and the network's tensors

    def _forget_capture(self, device: torch.device) -> None:
        """Report the end of a capture to torch's allocator: `capture_end` does not if it fails.

        Else it would reuse no memory that several streams use, and never free the pool
        (`CUDAGraph::capture_end` in aten/src/ATen/cuda/CUDAGraph.cpp).
        """
        for name in ("endAllocateToPool", "releasePool"):
            call = getattr(torch._C, f"_{device.type}_{name}", None)
            if call is None:
                return
            try:
                call(device.index, self._pool)
            except RuntimeError:
                return  # the allocator knows already: the capture had not begun, or had ended
