"""One of several processes under torchrun; `test_data_parallel` starts them."""

import contextlib
import gc
import os
import sys

import torch
from storm.selftest.compare import SETTINGS, assert_same, gradients, make_block
from storm.selftest.models import Mixed, batches
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    state = Mixed().eval().state_dict()

    def train(block):
        model = Mixed().eval()
        model.load_state_dict(state)
        model = DistributedDataParallel(model, bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for ids in batches("cpu", 10)[rank::2]:
            with block:
                loss = model(ids)
            loss.backward()
            optimizer.step()
            seen.append(gradients(model))
        return seen

    expected = train(contextlib.nullcontext())
    for index, settings in enumerate(SETTINGS):
        assert_same(expected, train(make_block("cpu", seed=2 * index + rank, **settings)))
    # Two processes write to one pipe, so each writes its whole line with one call.
    sys.stdout.write(f"the same in rank {rank}\n")
    sys.stdout.flush()
    # A model that still lives in a reference cycle keeps the group's threads alive.
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    # PyTorch's threads may request the interpreter while it shuts down, which aborts the process.
    # All comparisons are done by now; a failed one would have raised an exception before this line.
    os._exit(0)
