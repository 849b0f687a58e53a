"""Health signals through fakes behind the libraries' own names; the constants are the real pynvml's."""

import ast
import builtins
import importlib.util
import pickle
import sys
from pathlib import Path

import pynvml
import pytest
from management_fakes import H200, MI300X, MIG_UUID, UUIDS, Amd, Nvml, amdsmi_module, nvml_module, properties, torch_sees

from portable_flash.device import cpu
from portable_flash.validate import sensors, signals
from portable_flash.validate.report import DeviceReport, Report, to_json, verdict_of
from portable_flash.validate.signals import Readings, Sampler, checks, read

CORRECTED, UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
VOLATILE, AGGREGATE = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
NAMES = {"ecc-uncorrected", "ecc-corrected", "memory-repair", "throttle", "clocks", "temperature", "power"}


@pytest.fixture
def nvidia(monkeypatch):
    """nvidia(card, ...) puts the cards into the machine, the first of them torch's GPU 0."""

    def install(*cards, **options):
        torch_sees(monkeypatch, properties())
        module = nvml_module(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


@pytest.fixture
def amd(monkeypatch):
    def install(*processors, **options):
        torch_sees(monkeypatch, properties())
        module = amdsmi_module(*processors, **options)
        monkeypatch.setitem(sys.modules, "amdsmi", module)
        return module

    return install


def judged(before: Readings, after: Readings) -> dict:
    found = checks(before, after)
    assert len({c.id for c in found}) == len(found) and all(c.group == "signals" for c in found)
    return {c.id.partition("/")[2]: c for c in found}


def during(device, change=lambda: None) -> dict:
    """The checks of a run during which `change` happens."""
    before = read(device)
    change()
    return judged(before, read(device))


# ------------------------------------------------------------------ NVIDIA
def test_a_healthy_gpu_passes_with_its_readings_in_the_report(nvidia):
    module = nvidia(Nvml())
    found = during(H200)
    assert found.keys() == NAMES
    assert {c.status for c in found.values()} == {"pass"}
    assert all(c.hint == "" for c in found.values())
    before = read(H200)
    told = {s.name: s for s in signals.signals(before, read(H200))}
    assert told["sm_clock"].before == 1980 and told["sm_clock"].unit == "MHz"
    assert told["power"].after == 120.0 and told["power_limit"].after == 700.0
    assert told["memory_temperature"].after == 45
    assert told["ecc_uncorrected_lifetime"].after == 0
    assert told["throttle_reasons"].after == "none"
    assert told["xid"].before is None and "kernel's log" in told["xid"].reason
    assert module.open == 0  # every opening is closed
    assert pickle.loads(pickle.dumps(before)) == before


@pytest.mark.parametrize(
    "kind, status, severity, name",
    [(UNCORRECTED, "fail", "critical", "ecc-uncorrected"), (CORRECTED, "warn", "minor", "ecc-corrected")],
)
def test_memory_errors_during_the_run(nvidia, kind, status, severity, name):
    card = Nvml()
    card.ecc[kind, AGGREGATE] = 7
    nvidia(card)
    found = during(H200, lambda: card.ecc.update({(kind, VOLATILE): 2}))
    assert (found[name].status, found[name].severity, found[name].measured) == (status, severity, 2)
    assert found[name].hint
    assert {n for n, c in found.items() if c.status != "pass"} == {name}
    assert verdict_of(found.values()) == ("fail" if status == "fail" else "no_verdict")


def test_uncorrected_errors_before_the_run_are_a_warning_and_lifetime_counts_are_none(nvidia):
    card = Nvml()
    card.ecc[UNCORRECTED, AGGREGATE] = 4
    nvidia(card)
    assert during(H200)["ecc-uncorrected"].status == "pass"
    card.ecc[UNCORRECTED, VOLATILE] = 4
    found = during(H200)["ecc-uncorrected"]
    assert found.status == "warn" and "4 since the driver was loaded" in found.detail


def test_a_counter_that_falls_tells_of_a_reset(nvidia):
    card = Nvml()
    card.ecc[CORRECTED, VOLATILE] = 9
    nvidia(card)
    found = during(H200, lambda: card.ecc.clear())["ecc-corrected"]
    assert found.status == "warn" and "reset" in found.detail


@pytest.mark.parametrize("rows, status", [((1, 0, 0, 0), "pass"), ((0, 1, 1, 0), "warn"), ((0, 1, 0, 1), "fail")])
def test_row_remapping(nvidia, rows, status):
    card = Nvml()
    card.rows = rows
    nvidia(card)
    found = during(H200)["memory-repair"]
    assert found.status == status and (status == "pass") == (found.hint == "")
    assert found.data["remapped_rows_uncorrected"] == rows[1]


def test_rows_remapped_during_the_run(nvidia):
    card = Nvml()
    nvidia(card)
    found = during(H200, lambda: setattr(card, "rows", (0, 2, 0, 0)))["memory-repair"]
    assert found.status == "warn" and "remapped_rows_uncorrected 2" in found.detail


def test_older_gpus_retire_pages_instead(nvidia):
    card = Nvml()
    card.errors["nvmlDeviceGetRemappedRows"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvidia(card)
    assert during(H200)["memory-repair"].status == "pass"
    card.retired[pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR] = [4096]
    card.retirement_pending = 1
    found = during(H200)["memory-repair"]
    assert found.status == "warn" and found.data["retired_pages_uncorrected"] == 1


@pytest.mark.parametrize(
    "reason, status",
    [
        ("SwPowerCap", "pass"), ("GpuIdle", "pass"),
        ("HwThermalSlowdown", "warn"), ("SwThermalSlowdown", "warn"), ("HwPowerBrakeSlowdown", "warn"),
    ],
)
def test_throttle_reasons(nvidia, reason, status):
    card = Nvml()
    card.reasons = getattr(pynvml, f"nvmlClocksEventReason{reason}")
    nvidia(card)
    found = during(H200)["throttle"]
    assert found.status == status
    assert sensors.REASONS[reason] in found.detail  # named, not numbered
    assert (found.hint != "") == (status == "warn")


def test_hardware_slowdown_counts_when_it_stays(nvidia):
    card = Nvml()
    nvidia(card)
    assert during(H200, lambda: setattr(card, "reasons", pynvml.nvmlClocksEventReasonHwSlowdown))["throttle"].status == "pass"
    assert during(H200)["throttle"].status == "warn"  # before and after


def test_time_under_a_thermal_limit_is_seen_although_it_is_over(nvidia):
    card = Nvml()
    card.thermal_ns = 5_000_000_000
    nvidia(card)
    assert during(H200)["throttle"].status == "pass"  # of an earlier day
    found = during(H200, lambda: setattr(card, "thermal_ns", 5_250_000_000))["throttle"]
    assert found.status == "warn" and found.measured == pytest.approx(250) and "ms" in found.unit
    found = during(H200, lambda: setattr(card, "power_ns", 3_000_000_000))["throttle"]
    assert found.status == "pass" and "power cap for 3000 ms" in found.detail


def test_without_the_counter_nobody_knows_of_the_time_between(nvidia):
    card = Nvml()
    card.errors["nvmlDeviceGetViolationStatus"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvidia(card)
    found = during(H200)["throttle"]
    assert found.status == "unread" and "not counted" in found.detail and "Not Supported" in found.detail
    card.reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert during(H200)["throttle"].status == "warn"


def test_unknown_reasons_are_told_by_their_bits(nvidia):
    card = Nvml()
    card.reasons = 1 << 40
    nvidia(card)
    assert "others (0x10000000000)" in during(H200)["throttle"].detail


def test_the_reasons_exist_in_pynvml():
    """One of a newer pynvml is shown as its bit until it is named; the last two are of 2025."""
    known = {name.partition("Reason")[2] for name in dir(pynvml) if name.startswith("nvmlClocks")}
    assert sensors.REASONS.keys() - {"BoardLimit", "Reliability"} <= known
    assert {*signals.THERMAL_REASONS, signals.PASSING_REASON} <= {*sensors.REASONS.values(), *sensors.VIOLATIONS}


def test_a_gpu_at_its_slowdown_temperature(nvidia):
    card = Nvml()
    nvidia(card)
    found = during(H200, lambda: setattr(card, "temperature", 90))["temperature"]
    assert (found.status, found.measured, found.limit) == ("warn", 90, 87)


# ------------------------------------------------------------------ what cannot be read
def test_without_the_library_nothing_passes(monkeypatch):
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    found = during(H200)
    assert found.keys() == NAMES
    assert {c.status for c in found.values()} == {"unread"}
    assert all("nvidia-ml-py is not installed" in c.detail for c in found.values())
    assert verdict_of(found.values()) == "no_verdict"
    told = signals.signals(read(H200), read(H200))
    assert told and all(s.before is None and s.reason for s in told)


def test_without_a_driver(nvidia):
    nvidia(Nvml(), broken=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert all(c.status == "unread" and "NVML Shared Library Not Found" in c.detail for c in during(H200).values())


@pytest.mark.parametrize(
    "call, code, name, text",
    [
        ("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_NOT_SUPPORTED, "power", "Not Supported"),
        ("nvmlDeviceGetClockInfo", pynvml.NVML_ERROR_NO_PERMISSION, "clocks", "Insufficient Permissions"),
        ("nvmlDeviceGetTotalEccErrors", pynvml.NVML_ERROR_GPU_IS_LOST, "ecc-uncorrected", "GPU is lost"),
        ("nvmlDeviceGetTemperature", pynvml.NVML_ERROR_UNKNOWN, "temperature", "Unknown Error"),
    ],
)
def test_each_signal_is_read_on_its_own(nvidia, call, code, name, text):
    card = Nvml()
    card.errors[call] = code
    nvidia(card)
    found = during(H200)
    assert found[name].status == "unread" and text in found[name].detail
    unread = {n for n, c in found.items() if c.status == "unread"}
    assert unread == ({"ecc-uncorrected", "ecc-corrected"} if "Ecc" in call else {name})


def test_ecc_that_is_off_is_unread_and_says_so(nvidia):
    card = Nvml()
    card.ecc_on = False
    nvidia(card)
    found = during(H200)
    assert found["ecc-uncorrected"].status == "unread" and "ECC is off" in found["ecc-uncorrected"].detail


def test_neither_rows_nor_pages(nvidia):
    card = Nvml()
    calls = ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPages", "nvmlDeviceGetRetiredPagesPendingStatus")
    card.errors |= dict.fromkeys(calls, pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvidia(card)
    found = during(H200)["memory-repair"]
    assert found.status == "unread" and "remapped rows" in found.detail and "retirement" in found.detail


def test_a_signal_lost_during_the_run_is_unread(nvidia):
    card = Nvml()
    nvidia(card)
    found = during(H200, lambda: card.errors.update(nvmlDeviceGetTotalEccErrors=pynvml.NVML_ERROR_GPU_IS_LOST))
    assert found["ecc-uncorrected"].status == "unread" and "GPU is lost" in found["ecc-uncorrected"].detail


def test_older_pynvml_and_older_drivers(nvidia):
    card = Nvml()
    card.reasons = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    nvidia(card, without=("nvmlDeviceGetCurrentClocksEventReasons", "nvmlClocksEventReasonHwThermalSlowdown"))
    assert during(H200)["throttle"].status == "warn"
    nvidia(card)
    card.errors["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    assert during(H200)["throttle"].status == "warn"


# ------------------------------------------------------------------ which GPU
def test_the_gpu_is_found_by_address_whatever_the_order(nvidia, monkeypatch):
    """CUDA_VISIBLE_DEVICES=1: torch's GPU 0 is NVML's second."""
    other, ours = Nvml("0000:17:00.0", UUIDS[1]), Nvml()
    ours.clock, other.clock = 1111, 2222
    nvidia(other, ours)
    assert read(H200).number("sm_clock") == 1111
    torch_sees(monkeypatch, properties(address=False))  # older torch
    assert read(H200).number("sm_clock") == 1111
    torch_sees(monkeypatch, properties(bus=0x99))
    assert "0000:99:00.0" in read(H200).reason
    torch_sees(monkeypatch, properties(address=False, uuid=None))
    assert "neither PCI address nor UUID" in read(H200).reason


def test_a_mig_instance_reads_its_card(nvidia):
    card = Nvml()
    card.mig = [None, (MIG_UUID, "NVIDIA H200 MIG 1g.18gb")]
    card.errors["nvmlDeviceGetRemappedRows"] = pynvml.NVML_ERROR_NOT_SUPPORTED  # as NVML's reference says of MIG
    card.errors["nvmlDeviceGetRetiredPages"] = card.errors["nvmlDeviceGetRetiredPagesPendingStatus"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvidia(card)
    found = during(H200)
    assert found["temperature"].status == "pass" and found["memory-repair"].status == "unread"


# ------------------------------------------------------------------ AMD
def test_a_healthy_amd_gpu(amd):
    one = Amd()
    module = amd(Amd("0000:05:00.0"), one)
    found = during(MI300X, lambda: one.acc.update(acc_counter=2000))
    assert found.keys() == NAMES and {c.status for c in found.values()} == {"pass"}
    readings = read(MI300X)
    assert readings.number("sm_clock") == 2100 and readings.number("power_limit") == 750
    assert module.open == 0


def test_amd_clocks_of_older_libraries(amd):
    amd(Amd(), clock_name="cur_clk")
    assert read(MI300X).number("sm_clock") == 2100


@pytest.mark.parametrize("name, check", [("uncorrectable_count", "ecc-uncorrected"), ("deferred_count", "ecc-uncorrected")])
def test_amd_memory_errors(amd, name, check):
    one = Amd()
    amd(one)
    found = during(MI300X, lambda: one.ecc.update({name: 1}))
    assert (found[check].status, found[check].measured) == ("fail", 1)


def test_amd_bad_pages(amd):
    one = Amd()
    amd(one)
    page = {"value": 0, "page_address": 4096, "page_size": 4096}
    one.pages = "No bad pages found."  # older versions
    assert during(MI300X)["memory-repair"].status == "pass"
    one.pages = [page | {"status": 0}]
    assert during(MI300X)["memory-repair"].status == "pass"
    one.pages = [page | {"status": 1}]
    assert during(MI300X)["memory-repair"].status == "warn"
    one.pages = [page | {"status": 2}]
    assert during(MI300X)["memory-repair"].status == "fail"
    one.pages = []
    assert during(MI300X, lambda: setattr(one, "pages", [page | {"status": 0}]))["memory-repair"].status == "warn"


def test_amd_throttling_is_a_share_of_the_run(amd):
    one = Amd()
    amd(one)
    found = during(MI300X, lambda: one.acc.update(acc_counter=3000, acc_hbm_thrm=500, acc_ppt_pwr=1010))["throttle"]
    assert found.status == "warn" and found.measured == pytest.approx(25.0) and "power cap for 50 %" in found.detail
    found = during(MI300X, lambda: one.acc.update(acc_counter=5000, acc_ppt_pwr=3010))["throttle"]
    assert found.status == "pass"  # a power cap is how a busy GPU works
    found = during(MI300X)["throttle"]
    assert found.status == "unread" and "stood still" in found.detail
    one.active["active_socket_thrm"] = True
    assert "socket thermal" in during(MI300X)["throttle"].detail


def test_amd_gpus_without_counters_tell_whether_they_throttle(amd):
    one = Amd()
    one.missing.add("amdsmi_get_violation_status")
    amd(one)
    assert during(MI300X)["throttle"].status == "unread"  # throttle_status is N/A
    one.throttle_status = False  # now; what was during the run nobody knows
    found = during(MI300X)["throttle"]
    assert found.status == "unread" and "not counted" in found.detail and "none" in found.detail
    one.throttle_status = True
    assert during(MI300X)["throttle"].status == "warn"


def test_amd_signals_are_read_on_their_own(amd):
    one = Amd()
    one.missing |= {"amdsmi_get_gpu_bad_page_info", "amdsmi_get_gpu_total_ecc_count"}
    amd(one)
    found = during(MI300X, lambda: one.acc.update(acc_counter=2000))
    assert {n for n, c in found.items() if c.status == "unread"} == {"memory-repair", "ecc-uncorrected", "ecc-corrected"}
    assert "AMDSMI_STATUS_NOT_SUPPORTED" in found["memory-repair"].detail and "\n" not in found["memory-repair"].detail


def test_amd_without_its_library_and_at_another_address(amd, monkeypatch, capsys):
    amd(Amd("0000:44:00.0"))
    assert "0000:18:00.0" in read(MI300X).reason
    monkeypatch.delitem(sys.modules, "amdsmi")
    real = builtins.__import__

    def failing(name, *arguments, **options):
        if name == "amdsmi":
            print("Unable to find libamd_smi.so")  # as the package does
            raise KeyError("libamd_smi.so")
        return real(name, *arguments, **options)

    monkeypatch.setattr("portable_flash.validate.management.importlib.import_module", lambda name: failing(name))
    assert {c.status for c in during(MI300X).values()} == {"unread"}
    assert "libamd_smi.so" in read(MI300X).reason
    assert capsys.readouterr().out == ""  # the report may be on standard output


def test_the_names_of_amdsmi_exist():
    """Against the source of the installed package, which cannot be imported without its library."""
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        pytest.skip("amdsmi is not installed: it comes with ROCm")
    folder = Path(spec.origin).parent
    tree = ast.parse((folder / "amdsmi_interface.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    members = {
        node.name: {t.id for line in node.body if isinstance(line, ast.Assign) for t in line.targets if isinstance(t, ast.Name)}
        for node in tree.body if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    fake = amdsmi_module(Amd())
    exported = (folder / "__init__.py").read_text()
    for name in vars(fake):
        if name.startswith("amdsmi_"):
            assert name in functions and name in exported, name
    for name in ("AmdSmiClkType", "AmdSmiTemperatureType", "AmdSmiTemperatureMetric", "AmdSmiMemoryPageStatus"):
        assert {member.name for member in getattr(fake, name)} <= members[name] and name in exported
    text = (folder / "amdsmi_interface.py").read_text()
    keys = [*sensors.VIOLATIONS.values(), "acc_counter", "correctable_count", "uncorrectable_count", "deferred_count", "throttle_status"]
    for key in [*keys, "active_prochot_thrm", "current_socket_power", "power_limit", "product_serial", "driver_version"]:
        assert f'"{key}"' in text, key


# ------------------------------------------------------------------ CPU, sampler, report
def test_signals_do_not_apply_to_a_cpu():
    found = checks(read(cpu()), read(cpu()))
    assert [(c.id, c.status) for c in found] == [("signals/device", "skipped")]
    assert signals.signals(read(cpu()), read(cpu())) == []


def test_sampler_sees_what_happens_between_the_readings(nvidia):
    card = Nvml()
    module = nvidia(card)
    with Sampler(H200, period_s=0.001) as load:
        card.temperature, card.clock, card.reasons = 81, 1200, pynvml.nvmlClocksEventReasonSwThermalSlowdown
        seen = load.count
        while load.count < seen + 3:
            pass
        card.temperature, card.clock, card.reasons = 40, 1980, 0
    found = load.summary()
    assert found["sm_clock_min"] == 1200 and found["temperature_max"] == 81
    assert found["throttle_reasons"] == "software thermal slowdown"
    assert module.open == 0


def test_sampler_without_signals(monkeypatch):
    with Sampler(cpu()) as load:
        pass
    assert load.summary() == {} and load.reason
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler(H200) as load:
        pass
    assert load.summary() == {} and "nvidia-ml-py" in load.reason


def test_readings_fit_into_the_document(nvidia):
    nvidia(Nvml())
    from portable_flash.validate import identity

    before = read(H200)
    told = signals.signals(before, before)
    device = DeviceReport(identity=identity.identify(H200), verdict="pass", checks=checks(before, before), signals=told)
    report = Report(
        host="h", verdict="pass", level="quick", seed=0, started="2026-01-01T00:00:00+00:00", seconds=1.0, strict=False, command=[],
        software=identity.software(), devices=[device],
    )  # fmt: skip
    assert '"ecc_uncorrected"' in to_json(report)
