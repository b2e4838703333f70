"""Images per second that PyTorch trains the networks of image_classifier.py with, to compare with `storm train`.

    python examples/pytorch/image_speed.py --networks small-cnn,resnet-18 --batches 512,1024

bf16 and channels-last, SGD with Nesterov momentum, one batch of random pictures that stays on the GPU: nothing is loaded or
augmented. Eager and compiled; with autocast, and with everything in bf16.
"""

import argparse
import time

import torch
from image_classifier import build

NETWORKS = {
    "small-cnn": {"architecture": "small-cnn", "widths": [32, 64, 128], "hidden": 256, "dropout": 0.5},
    "resnet-9": {"architecture": "resnet9", "widths": [64, 128, 256, 512], "logit_scale": 0.125},
    "resnet-18": {"architecture": "resnet", "widths": [64, 128, 256, 512], "blocks": 2},
}
WARM_UP_STEPS = 12
SECONDS = 2.0


def images_per_second(name: str, batch: int, compiled: bool, autocast: bool) -> float:
    torch.manual_seed(0)
    config = {"network": NETWORKS[name], "channels": 3, "image_size": [32, 32], "classes": 10}
    model = build(config).cuda().to(memory_format=torch.channels_last)
    if not autocast:
        model = model.bfloat16()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    forward = torch.compile(model) if compiled else model
    images = torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, 10, (batch,), device="cuda")

    def step() -> None:
        x = (images.permute(0, 3, 1, 2).to(torch.bfloat16) / 255 - 0.47) / 0.25
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = forward(x)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for _ in range(10):
            step()
        steps += 10
        torch.cuda.synchronize()
    return steps * batch / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="small-cnn,resnet-18", help="names, with commas between them")
    parser.add_argument("--batches", default="512,1024", help="pictures of a step, with commas between them")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU")
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, images per second")
    for name in arguments.networks.split(","):
        for batch in map(int, arguments.batches.split(",")):
            for compiled in [False, True]:
                for autocast in [True, False]:
                    rate = images_per_second(name, batch, compiled, autocast)
                    how = f"{'compiled' if compiled else 'eager':9}{'autocast' if autocast else 'bf16':9}"
                    print(f"{name:10} {batch:5} {how} {rate:10,.0f}", flush=True)
                    torch._dynamo.reset()


if __name__ == "__main__":
    main()
