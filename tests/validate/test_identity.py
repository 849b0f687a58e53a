"""Which device and software: from torch alone, and completed by the vendors' libraries."""

import sys

import pynvml
import pytest
import torch
from management_fakes import H200, MI300X, MIG_UUID, UUIDS, Amd, Nvml, amdsmi_module, nvml_module, properties, torch_sees

from portable_flash.device import cpu
from portable_flash.validate import identity, management


@pytest.fixture(autouse=True)
def no_host_driver(monkeypatch, tmp_path):
    """The machine that runs the tests may have a driver."""
    monkeypatch.setattr(identity, "_MODULES", tmp_path)
    return tmp_path


def test_nvidia_with_its_library(monkeypatch):
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(Nvml("0000:17:00.0", UUIDS[1]), Nvml()))
    found = identity.identify(H200)
    assert (found.index, found.slug, found.vendor, found.arch, found.compute_units) == (0, "h200", "nvidia", "sm_90", 132)
    assert found.uuid == f"GPU-{UUIDS[0]}" and found.serial == "1650000000001" and found.vbios == "96.00.A5.00.01"
    assert found.pci_address == "0000:18:00.0" and found.pci_id == "10de:2335" and found.partition is None
    assert identity.driver(H200) == "580.159.04"
    torch_sees(monkeypatch, properties(address=False))  # older torch
    assert identity.identify(H200) == found


def test_nvidia_without_its_library_torch_tells_what_it_knows(monkeypatch):
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = identity.identify(H200)
    assert found.uuid == f"GPU-{UUIDS[0]}" and found.pci_address == "0000:18:00.0"
    assert found.serial is None and found.vbios is None
    assert identity.driver(H200) is None


def test_a_torch_that_tells_nothing(monkeypatch):
    def fails(index):
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    found = identity.identify(H200)
    assert found.name == "NVIDIA H200" and found.uuid is None and found.pci_address is None
    torch_sees(monkeypatch, properties(uuid="00000000-0000-0000-0000-000000000000", address=False))
    assert identity.identify(H200).uuid is None


def test_serials_of_consumer_boards_are_not_told(monkeypatch):
    card = Nvml()
    card.errors["nvmlDeviceGetSerial"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(card))
    found = identity.identify(H200)
    assert found.serial is None and found.vbios == "96.00.A5.00.01"


@pytest.mark.parametrize(
    "uuid, visible, instances, expected",
    [
        (MIG_UUID, None, [None, (MIG_UUID, "NVIDIA H200 MIG 1g.18gb"), (UUIDS[1], "NVIDIA H200 MIG 3g.71gb")], ("MIG 1g.18gb", MIG_UUID)),
        (UUIDS[0], f"MIG-{UUIDS[1]}", [(MIG_UUID, "H200 MIG 1g.18gb"), (UUIDS[1], "H200 MIG 3g.71gb")], ("MIG 3g.71gb", UUIDS[1])),
        (UUIDS[0], None, [(MIG_UUID, "NVIDIA H200 MIG 1g.18gb"), None], ("MIG 1g.18gb", MIG_UUID)),
    ],
)
def test_mig_instance_by_uuid_by_name_or_alone(monkeypatch, uuid, visible, instances, expected):
    card = Nvml()
    card.mig = instances
    torch_sees(monkeypatch, properties(uuid=uuid))
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(card))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = identity.identify(H200)
    assert (found.partition, found.uuid) == (expected[0], f"MIG-{expected[1]}")


def test_mig_instance_in_doubt_is_not_guessed(monkeypatch):
    card = Nvml()
    card.mig = [(MIG_UUID, "NVIDIA H200 MIG 1g.18gb"), (UUIDS[1], "NVIDIA H200 MIG 3g.71gb")]
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(card))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert identity.identify(H200).partition == "MIG"


def test_amd_with_its_library(monkeypatch):
    torch_sees(monkeypatch, properties(uuid="37613166-3362-3263-3464-356536663730"))  # ROCm: the text of a number as bytes
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi_module(Amd("0000:05:00.0"), Amd()))
    found = identity.identify(MI300X)
    assert found.uuid == "GPU-7a1f3b2c4d5e6f70" and found.serial == "692251001124" and found.partition == "SPX"
    assert found.vbios == "022.040.003.043.000001" and found.pci_address == "0000:18:00.0"
    assert identity.driver(MI300X) == "6.16.6"


def test_amd_names_a_device_alike_with_and_without_its_library(monkeypatch):
    torch_sees(monkeypatch, properties(uuid="37613166-3362-3263-3464-356536663730"))
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi_module(Amd()))
    told = identity.identify(MI300X)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    alone = identity.identify(MI300X)
    assert (told.uuid, told.pci_address) == (alone.uuid, alone.pci_address) and alone.serial is None
    torch_sees(monkeypatch, properties(uuid=None))
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi_module(Amd()))
    assert identity.identify(MI300X).uuid == "a4ff74a1-0000-1000-8012-345678abcdef"


def test_amd_values_that_are_not_available_are_none(monkeypatch):
    torch_sees(monkeypatch, properties())
    module = amdsmi_module(Amd())
    module.amdsmi_get_gpu_board_info = lambda one: {"product_serial": "N/A"}
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    assert identity.identify(MI300X).serial is None


def test_partitions_of_one_amd_card(monkeypatch):
    """They share the card's sensors and its serial; a UUID of the card would be that of all of them."""
    torch_sees(monkeypatch, properties(uuid=None))
    monkeypatch.setitem(sys.modules, "amdsmi", amdsmi_module(Amd("0000:18:00.0"), Amd("0000:18:00.1")))
    found = identity.identify(MI300X)
    assert found.uuid is None and found.serial == "692251001124"


@pytest.mark.parametrize("vendor, module, device", [("nvidia", "nvidia", H200), ("amd", "amdgpu", MI300X)])
def test_driver_from_the_kernel_first(no_host_driver, monkeypatch, vendor, module, device):
    (no_host_driver / module).mkdir()
    (no_host_driver / module / "version").write_text("575.1\n")
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(Nvml()))
    assert identity.driver(device) == "575.1"


def test_driver_of_the_kernel_itself(no_host_driver):
    (no_host_driver / "amdgpu").mkdir()
    assert identity.driver(MI300X).startswith("kernel ")


def test_cpu_by_what_its_sums_depend_on():
    found = identity.identify(cpu())
    assert (found.index, found.slug, found.vendor) == (None, "cpu", "cpu") and found.name != "CPU" and found.memory_bytes > 0
    assert found.partition == torch.backends.cpu.get_cpu_capability()
    assert identity.driver(cpu()) is None


def test_cpu_model_of_a_machine_without_proc(monkeypatch, tmp_path):
    identity._cpu_model.cache_clear()
    monkeypatch.setattr(identity, "_CPU_FACTS", tmp_path / "none")
    assert identity._cpu_model()
    identity._cpu_model.cache_clear()


def test_software_of_this_installation():
    found = identity.software()
    assert found.torch == torch.__version__ and found.python == sys.version.split()[0] and found.platform


def test_pci_address_in_the_form_of_the_libraries():
    assert management.pci_address(properties(bus=0xC1)) == "0000:c1:00.0"
