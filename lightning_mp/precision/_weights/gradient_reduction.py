"""DDP's gradient mean of half weights, taken in fp32."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["average_in_fp32"]


def average_in_fp32(model: DistributedDataParallel) -> bool:
    """Let DDP average 16-bit gradients in fp32; return whether it does.

    DDP divides by the number of ranks before it sums, in the gradients' dtype: in fp16 that loses
    the values below 6e-8 W, and each of the sums is rounded. Here a bucket is widened, divided,
    summed and rounded once. That doubles the bytes on the wire; a model that has a communication
    hook of its own keeps it.
    """
    if model._comm_hooks:
        return False
    model.register_comm_hook(model.process_group, _mean_in_fp32)
    return True


# DDP reads the annotations of its hooks and takes no other.
def _mean_in_fp32(
    process_group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    mean = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
    mean = mean.div(dist.get_world_size(process_group))
    work = dist.all_reduce(mean, group=process_group, async_op=True)

    def rounded(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(future.value()[0])

    result: torch.futures.Future[Tensor] = work.get_future().then(rounded)
    return result
