"""CUDA and its libraries in a job's process: the list of system calls that it may make closes none that they need."""

import json
import os
import subprocess
import sys

import pytest

from catalog.frames import LogLine
from worker.process.child_process import Child, child_environment
from worker.process.confinement import Confinement

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

COMPUTES = """
import json, os, sys, tempfile
import torch
from torch import nn
from catalog.frames import LogLine, encode

device = torch.device("cuda")
a = torch.randn(500, 500, device=device)
told = {"seccomp": [line.split()[1] for line in open("/proc/self/status") if line.startswith("Seccomp:")]}
told["cuSOLVER"] = len(torch.linalg.eigvalsh(a @ a.T))
told["cuDNN"] = list(nn.Conv2d(3, 8, 3).to(device)(torch.randn(2, 3, 32, 32, device=device)).shape)
told["pinned"] = float(torch.ones(1000).pin_memory().to(device, non_blocking=True).sum())
with tempfile.TemporaryDirectory() as folder:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    ones = torch.ones(10, device=device)
    torch.distributed.all_reduce(ones)
    told["NCCL"] = float(ones.sum())
    torch.distributed.destroy_process_group()
graph, still = torch.cuda.CUDAGraph(), torch.zeros(100, device=device)
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    moved = still + 1
graph.replay()
told["graph"] = float(moved.sum())
loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2, pin_memory=True)
told["loader"] = sum(len(each) for each in loader)
os.write(int(sys.argv[-1]), encode(LogLine(level="info", message=json.dumps(told))))
"""


def test_cuda_and_its_libraries_compute_behind_the_list_of_system_calls() -> None:
    environment = child_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = Child.start({}, subprocess.PIPE, environment, [sys.executable, "-c", COMPUTES], Confinement())
    try:
        frames = list(child.frames())
        said = b"".join(child.output(10_000)).decode(errors="replace")
        assert child.wait(240) == 0, said
    finally:
        child.close()
    (frame,) = frames
    assert isinstance(frame, LogLine)
    assert json.loads(frame.message) == {
        "seccomp": ["2"],
        "cuSOLVER": 500,
        "cuDNN": [2, 8, 30, 30],
        "pinned": 1000.0,
        "NCCL": 10.0,
        "graph": 100.0,
        "loader": 8,
    }
