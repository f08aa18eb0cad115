"""A worker with PyTorch: under FSDP2 or alone, eager or compiled. No JAX is needed."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.step.inputs import tokens
from benchmarks.step.serve import Task, main
from benchmarks.step.torch_model import GPT, put_weights


class TorchTrainer:
    """See `benchmarks.step.serve.Trainer`."""

    def __init__(self, task: Task) -> None:
        begin = time.perf_counter()
        self._task = task
        self._device = _start(task)
        self._model = _model(task, self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=task.sizes.learning_rate, eps=1e-8, weight_decay=0.01, fused=True
        )
        self._batches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scalars: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ready_s = time.perf_counter() - begin

    def load(self, steps: range) -> None:
        """See `Trainer`."""
        for step in steps:
            rows = tokens(self._task.sizes, step=step, process=self._task.process)
            inputs, targets = (torch.from_numpy(part.astype(np.int64)).to(self._device) for part in rows)
            self._batches[step] = inputs, targets
        self._synchronize()

    def start(self, step: int) -> None:
        """See `Trainer`."""
        low = self._task.sizes.dtype != "float32" and not self._task.address  # under FSDP2 the policy casts
        with torch.autocast(self._device.type, torch.bfloat16) if low else contextlib.nullcontext():
            loss = self._model(*self._batches.pop(step))
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None], foreach=True
        )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._scalars.append((loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm))

    def wait(self) -> None:
        """See `Trainer`."""
        self._synchronize()

    def scalars(self) -> tuple[list[float], list[float]]:
        """See `Trainer`."""
        found, self._scalars = self._scalars, []
        losses = [loss.float() for loss, _ in found]
        if self._task.address:  # each process has the mean over its own rows
            for loss in losses:
                dist.all_reduce(loss)
            losses = [loss / self._task.processes for loss in losses]
        return [float(loss) for loss in losses], [float(norm) for _, norm in found]

    def facts(self) -> dict[str, Any]:
        """See `Trainer`."""
        on_gpu = self._device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "ready_s": self._ready_s,
            "compiled_bytes": None,
            "collectives": {},
            "versions": {"torch": torch.__version__},
        }

    def peak_bytes(self) -> int | None:
        """See `Trainer`."""
        return torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _start(task: Task) -> torch.device:
    if task.device == "cpu":
        torch.set_num_threads(1)
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", task.process % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if task.address:
        backend = "gloo" if task.device == "cpu" else "nccl"
        dist.init_process_group(
            backend, init_method=f"tcp://{task.address}", rank=task.process, world_size=task.processes
        )
    return device


def _model(task: Task, device: torch.device) -> GPT:
    """Built without memory, then cut, then given its weights: as FSDP2's documentation says."""
    with torch.device("meta"):
        model = GPT(task.sizes)
    if task.options["compile"]:
        if task.address:  # a layer at a time, as torchtitan does: collectives stay between the programs
            for block in model.blocks:
                block.compile(fullgraph=True)
        else:
            model.compile()
    if task.address:
        policy = MixedPrecisionPolicy()
        if task.sizes.dtype != "float32":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(device.type, (task.processes,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    put_weights(model, task.sizes)
    return model


if __name__ == "__main__":
    main(TorchTrainer)
