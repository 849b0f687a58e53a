"""Detection from what torch reports, and the catalogue; no GPU needed."""

from types import SimpleNamespace

import pytest
import torch

from portable_flash import device as devices
from portable_flash.device import Device, all_devices, catalogue, detect, named

GIB = 2**30


def nvidia(name, major, minor, units, memory_gib, **more):
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=units, total_memory=int(memory_gib * GIB), warp_size=32,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=52428800, **more,
    )  # fmt: skip


def amd(name, gcn, units, memory_gib, wave, **more):
    return SimpleNamespace(
        name=name, major=9, minor=4, gcnArchName=gcn, multi_processor_count=units, total_memory=int(memory_gib * GIB), warp_size=wave,
        shared_memory_per_block=65536, shared_memory_per_block_optin=0, L2_cache_size=4 << 20, **more,
    )  # fmt: skip


H100 = nvidia("NVIDIA H100 80GB HBM3", 9, 0, 132, 79.1)
H200 = nvidia("NVIDIA H200", 9, 0, 132, 139.8)
MI300X = amd("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, 191.98, 64)
RX7900XTX = amd("Radeon RX 7900 XTX", "gfx1100", 48, 23.98, 32)


@pytest.fixture
def gpus(monkeypatch):
    """A machine with these GPUs: gpus(properties, ..., hip=None or a version)."""

    def install(*properties, hip=None):
        devices._detect.cache_clear()
        calls = []
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: calls.append(index) or properties[index])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: len(properties) - 1)
        monkeypatch.setattr(torch.version, "hip", hip)
        return calls

    yield install
    devices._detect.cache_clear()


@pytest.fixture
def sysfs(monkeypatch, tmp_path):
    """A PCI bus: sysfs(address, vendor, device)."""
    monkeypatch.setattr(devices, "_SYSFS", tmp_path)

    def plug(address, vendor, device):
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"0x{vendor}\n")
        (tmp_path / address / "device").write_text(f"0x{device}\n")

    return plug


@pytest.mark.parametrize(
    "properties, hip, slug, arch",
    [
        (H200, None, "h200", "sm_90"),
        (H100, None, "h100", "sm_90"),
        (MI300X, "6.4", "mi300x", "gfx942"),
        (RX7900XTX, "6.4", "rx7900xtx", "gfx1100"),
    ],
    ids=["h200", "h100", "mi300x", "rx7900xtx"],
)
def test_detects_by_arch_units_and_memory(gpus, properties, hip, slug, arch):
    gpus(properties, hip=hip)
    found = detect(torch.device("cuda", 0))
    assert (found.slug, found.arch, found.name, found.index) == (slug, arch, properties.name, 0)
    assert found.memory_bytes == properties.total_memory and found.present


def test_torch_speaks_for_nvidia_and_the_file_for_amd_caches(gpus):
    gpus(H200)
    assert detect("cuda:0").l2_bytes == 52428800 and detect("cuda:0").shared_memory_bytes == 232448
    gpus(MI300X, hip="6.4")
    found = detect("cuda:0")
    assert found.l2_bytes == 256 << 20  # the Infinity Cache, not one chiplet's 4 MiB
    assert (found.shared_memory_bytes, found.wave_size, found.xcds, found.registers_per_thread) == (65536, 64, 8, 512)


def test_pci_id_decides_before_memory_and_name(gpus, sysfs):
    sysfs("0000:1b:00.0", "10de", "2330")
    gpus(nvidia("some board", 9, 0, 132, 139.8, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0))
    found = detect("cuda:0")
    assert (found.slug, found.pci_id) == ("h100", "10de:2330")


def test_pci_id_tells_amd_parts_apart(gpus, sysfs):
    sysfs("0002:c1:00.0", "1002", "74a5")
    gpus(amd("AMD Instinct", "gfx942", 304, 191.0, 64, pci_domain_id=2, pci_bus_id=0xC1, pci_device_id=0), hip="7.1")
    assert detect("cuda:0").slug == "mi325x"


@pytest.mark.parametrize("vendor", ["8086", "not hexadecimal"])
def test_a_pci_entry_that_is_no_gpu_is_ignored(gpus, sysfs, vendor):
    sysfs("0000:01:00.0", vendor, "2335")
    gpus(nvidia("NVIDIA H200", 9, 0, 132, 139.8, pci_domain_id=0, pci_bus_id=1, pci_device_id=0))
    found = detect("cuda:0")
    assert (found.slug, found.pci_id) == ("h200", None)


def test_a_partition_has_its_share_of_the_chiplets(gpus, sysfs):
    sysfs("0000:01:00.0", "1002", "74a1")
    gpus(amd("AMD Instinct MI300X", "gfx942", 38, 24.0, 64, pci_domain_id=0, pci_bus_id=1, pci_device_id=0), hip="7.1")
    found = detect("cuda:0")
    assert (found.slug, found.xcds, found.compute_units) == ("mi300x", 1, 38)


def test_a_gpu_without_a_file_is_named_by_its_arch(gpus):
    gpus(nvidia("NVIDIA H20", 9, 0, 78, 95.6))
    assert detect("cuda:0").slug == "sm_90"
    gpus(amd("AMD Instinct MI300A", "gfx942:sramecc+:xnack-", 228, 128, 64), hip="6.4")
    found = detect("cuda:0")
    assert (found.slug, found.xcds, found.registers_per_thread, found.shared_memory_bytes) == ("gfx942", 6, 512, 65536)


def test_old_properties_without_the_newer_fields(gpus):
    gpus(SimpleNamespace(name="Radeon", gcnArchName="gfx1103", major=11, minor=0, multi_processor_count=6, total_memory=4 * GIB), hip="5.7")
    found = detect("cuda:0")
    assert (found.shared_memory_bytes, found.wave_size, found.registers_per_thread) == (65536, 32, 256)


def test_detection_is_cached_by_index_and_follows_the_current_device(gpus):
    calls = gpus(H100, H200)
    assert detect("cuda") is detect(1) is detect(torch.device("cuda:1"))
    assert detect("cuda").slug == "h200"
    assert calls == [1]
    assert [d.slug for d in all_devices()] == ["h100", "h200", "cpu"]


def test_cpu_and_other_devices(gpus):
    gpus()
    assert detect("cpu").vendor == "cpu" and detect("cpu").present
    assert [d.slug for d in all_devices()] == ["cpu"]
    with pytest.raises(ValueError, match="'meta'.*'cpu' and 'cuda'"):
        detect("meta")


@pytest.mark.parametrize(
    "alias, slug",
    [("h200", "h200"), ("NVIDIA H200", "h200"), ("H100", "h100"), ("a100", "a100"), ("MI300X", "mi300x"), ("AMD Instinct MI300X", "mi300x"),
     ("rx7900xtx", "rx7900xtx"), ("RX 7900-XTX", "rx7900xtx"), ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
     ("rtx 4090", "rtx4090"), ("Strix Halo", "strix-halo"), ("CPU", "cpu")],
)  # fmt: skip
def test_named(alias, slug):
    found = named(alias)
    assert found.slug == slug and found.index is None


def test_named_lists_what_is_known():
    with pytest.raises(ValueError, match="'h300': known are cpu, .*h200.*mi300x"):
        named("h300")


def test_catalogue_facts():
    """Every file is consistent: aliases and PCI ids name one GPU, limits are those of the arch."""
    shared = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx950": 163840}
    keys, ids = {}, {}
    for slug, record in catalogue().items():
        found = named(slug)
        assert found.shared_memory_bytes == shared.get(record.arch, 65536), slug
        assert found.wave_size == (64 if record.arch.startswith("gfx9") else 32), slug
        assert found.is_cdna == (record.arch.startswith("gfx9") and record.arch != "gfx906"), slug
        assert found.registers_per_thread == (255 if record.vendor == "nvidia" else 512 if found.is_cdna else 256), slug
        assert found.l2_bytes > 0 and found.memory_bytes > 0, slug
        for alias in {devices._key(a) for a in (slug, *record.aliases)}:
            assert keys.setdefault(alias, slug) == slug
        for pci_id in record.pci_ids:
            assert pci_id.startswith({"nvidia": "10de:", "amd": "1002:"}[record.vendor])
            assert ids.setdefault(pci_id, slug) == slug
    assert len(catalogue()) >= 20


def test_capabilities():
    assert named("h200").has_tma and named("h200").has_wgmma
    assert named("rtx5090").has_tma and not named("b200").has_wgmma
    assert not named("a100").has_tma and not named("mi300x").has_tma
    assert not Device("x", "amd", "gfx1201", "x", 32).is_cdna
