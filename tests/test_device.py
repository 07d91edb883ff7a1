import os

import pytest
import torch

from ebbtide import device as module
from ebbtide.device import Device, DeviceMemory, available, host_memory, reset_host_peak
from ebbtide.errors import ConfigError, MissingExtraError

MIB = 1024 * 1024


def test_the_cpu_is_always_there_and_comes_last() -> None:
    assert available()[-1] == "cpu"
    cpu = Device.of("cpu")
    assert (cpu.type, cpu.torch, cpu.backend) == ("cpu", torch.device("cpu"), "gloo")
    assert Device.of("auto").type == available()[0]


def test_on_the_cpu_there_is_nothing_to_wait_for_or_give_back() -> None:
    cpu = Device("cpu")
    cpu.synchronize()
    cpu.empty_cache()
    cpu.reset_peak()
    assert cpu.memory() == DeviceMemory(0, 0, 0, 0)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:0"])
def test_a_name_of_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda, npu"):
        Device.of(name)


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: ["cpu"])
    with pytest.raises(ConfigError, match=r"device='cuda': this machine has: cpu. Use device = 'auto'"):
        Device.of("cuda")
    monkeypatch.setattr("ebbtide.device.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"device='npu': needs torch_npu. pip install torch_npu"):
        Device.of("npu")


def test_an_index_is_kept_where_there_is_more_than_one() -> None:
    assert Device("cuda", 3).torch == torch.device("cuda", 3)
    assert Device("cuda", 3).backend == "nccl"


def test_host_bytes_follow_what_is_allocated_and_the_peak_starts_anew() -> None:
    before = host_memory()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    assert host_memory().rss_bytes - before.rss_bytes > 60 * MIB
    del block
    if not reset_host_peak():
        pytest.skip("this kernel does not let a process start a new peak")
    after = host_memory()
    assert after.rss_bytes <= after.peak_rss_bytes < after.rss_bytes + 8 * MIB


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # the child reads a file alone
def test_a_child_reads_its_own_memory() -> None:
    block = bytearray(os.urandom(1)) * (64 * MIB)
    parent = host_memory().rss_bytes
    child = os.fork()
    if child == 0:
        os._exit(0 if host_memory().rss_bytes < parent - 32 * MIB else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(block) == 64 * MIB


def test_without_proc_the_kernels_own_peak_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STATUS", "/proc/no/such/file")
    monkeypatch.setattr(module, "_CLEAR_REFS", "/proc/no/such/file")
    assert host_memory().rss_bytes > 0
    assert reset_host_peak() is False
