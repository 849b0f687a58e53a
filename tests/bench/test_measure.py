"""A whole run on the CPU: right implementations are timed, wrong ones are named and not timed, results survive JSON."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from portable_flash import bench
from portable_flash.bench import peers as peers_module
from portable_flash.bench.peers import PEERS, Built, Peer, Refused
from portable_flash.bench.records import OK, REFUSED, WRONG, speed_report_from_dict

SHAPE = "1,4,2,64,96,32,causal"
FAST = ["--device", "cpu", "--rounds", "2", "--budget-ms", "1"]


class Spy:
    """Right but for `factor` times the key (0 = right), and counts its calls."""

    def __init__(self, factor=0.0, backward_factor=0.0):
        self.factor, self.backward_factor, self.calls = factor, backward_factor, 0

    def build(self, case, query, key, value):
        hidden = peers_module.hidden_pairs(case, query.device)

        def call(query, key, value):
            self.calls += 1
            key, value = (peers_module.repeat_heads(tensor, case.group) for tensor in (key, value))
            out = F.scaled_dot_product_attention(query, key * (1 + self.factor), value, attn_mask=None if hidden is None else ~hidden)
            if self.backward_factor and out.requires_grad:
                out.register_hook(lambda grad: grad * (1 + self.backward_factor))
            return out

        return Built(call)

    def peer(self, name):
        return Peer(name, name, self.build, ("cpu",))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(*extra, **spies):
        for name, spy in spies.items():
            monkeypatch.setitem(PEERS, name, spy.peer(name) if isinstance(spy, Spy) else spy)
        out = tmp_path / "results.json"
        code = bench.main(["--peers", ",".join(["sdpa_math", *spies]), *FAST, "--out", str(out), *extra])
        data = json.loads(out.read_text())
        return code, {result["peer"]: result for result in data["rows"][0]["results"]}, data, capsys.readouterr().out

    return run


def test_what_is_right_is_timed_beside_its_peers(run):
    code, results, data, printed = run("--shape", SHAPE)
    assert code == 0
    for name in ("ours", "sdpa_math"):
        for direction in ("forward", "backward"):
            outcome = results[name]["outcomes"][direction]
            assert outcome["status"] == OK and outcome["errors"], (name, direction, outcome)
            assert 0 < outcome["p20_us"] <= outcome["median_us"] <= outcome["p80_us"]
            assert outcome["rounds"] == 2 and outcome["tflops"] > 0
    assert results["sdpa_math"]["outcomes"]["forward"]["ratio"] == 1
    assert results["ours"]["peak_extra_bytes"] > 0
    compared = {"out_error_ratio", "query_error_ratio", "key_error_ratio", "value_error_ratio"}
    at_full_size = {f"{name}_relative_to_sdpa_math" for name in ("out", "query", "key", "value")}
    assert results["ours"]["outcomes"]["backward"]["errors"].keys() == compared | at_full_size
    assert "B1 H4/2 S64/96 D32 causal" in printed and "FLOPs: 4*B*H*S*S*D" in printed
    assert data["identity"]["versions"]["torch"] == torch.__version__
    assert data["identity"]["command"].startswith("portable-flash bench --peers sdpa_math")


def test_a_wrong_output_is_named_and_not_timed(run):
    spy = Spy(factor=0.05)
    code, results, _, printed = run("--shape", SHAPE, spy=spy)
    assert code == 0  # the tool did its work; only this library's own faults fail it
    assert results["spy"]["outcomes"]["forward"]["status"] == WRONG
    assert results["spy"]["outcomes"]["forward"]["median_us"] is None
    assert results["spy"]["outcomes"]["backward"]["status"] == WRONG
    assert spy.calls == 1
    assert "WRONG" in printed
    assert results["ours"]["outcomes"]["forward"]["status"] == OK


def test_a_wrong_gradient_is_named_while_the_right_forward_is_timed(run):
    code, results, _, _ = run("--shape", SHAPE, ours=Spy(backward_factor=0.05))
    assert code == 1
    forward, backward = (results["ours"]["outcomes"][direction] for direction in ("forward", "backward"))
    assert forward["status"] == OK and forward["median_us"] > 0
    assert backward["status"] == WRONG and backward["median_us"] is None and backward["tflops"] is None


def test_nan_is_wrong(run):
    code, results, _, _ = run("--shape", SHAPE, ours=Spy(factor=float("nan")))
    assert code == 1 and results["ours"]["outcomes"]["forward"]["status"] == WRONG


def test_a_right_spy_is_right(run):
    code, results, _, _ = run("--shape", SHAPE, spy=Spy())
    assert code == 0 and results["spy"]["outcomes"]["backward"]["status"] == OK


def test_a_refusal_keeps_its_reason(run):
    def refuse(case, query, key, value):
        raise Refused("head_dim 32 is not for me")

    code, results, _, printed = run("--shape", SHAPE, refuser=Peer("refuser", "refuser", refuse, ("cpu",)))
    assert code == 0
    outcome = results["refuser"]["outcomes"]["forward"]
    assert (outcome["status"], outcome["reason"], outcome["median_us"]) == (REFUSED, "head_dim 32 is not for me", None)
    assert "head_dim 32 is not for me" in printed


def test_absent_peers_are_reported(run):
    _, _, data, printed = run("--shape", SHAPE, nowhere=Peer("nowhere", "nowhere", Spy().build, ("cpu",), module="no_such_module_here"))
    assert "no_such_module_here cannot be imported" in data["absent"]["nowhere"] and "no_such_module_here" in printed


def test_forward_alone(run):
    _, results, _, printed = run("--shape", SHAPE, "--direction", "forward")
    assert {direction: outcome["status"] for direction, outcome in results["ours"]["outcomes"].items()} == {"forward": OK}
    assert "backward, fp32" not in printed


def test_json_round_trip(run):
    _, _, data, _ = run("--shape", SHAPE)
    assert asdict(speed_report_from_dict(data)) == data
    with pytest.raises(ValueError, match="schema=99"):
        speed_report_from_dict({**data, "schema": 99})


def test_plots_are_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    shapes = ["1,2,2,64,64,16", "1,2,2,128,128,16", "1,2,2,64,64,16,causal", "1,2,2,64,64,32"]
    figure = tmp_path / "speed.png"
    run(*(word for shape in shapes for word in ("--shape", shape)), "--plot", str(figure))
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 10_000


def test_all_default_cpu_peers_are_right(tmp_path):
    out = tmp_path / "r.json"
    assert bench.main(["--shape", "1,4,4,128,128,32", "--shape", "1,4,4,128,128,32,causal", *FAST, "--out", str(out)]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert row["baseline"] == "sdpa_flash"
        assert {result["peer"] for result in row["results"]} == {"ours", "sdpa_flash", "sdpa_math"}
        assert all(outcome["status"] == OK for result in row["results"] for outcome in result["outcomes"].values())


def test_an_error_between_the_cuts_is_seen_at_full_size(run):
    """The oracle looks at the first and the last head; the others are compared with SDPA."""

    def build(case, query, key, value):
        def call(query, key, value):
            out = F.scaled_dot_product_attention(query, key, value)
            return torch.cat([out[:, :1], out[:, 1:2] * 1.01, out[:, 2:]], 1)

        return Built(call)

    _, results, _, _ = run("--shape", "1,4,4,64,64,32", spy=Peer("spy", "spy", build, ("cpu",)))
    outcome = results["spy"]["outcomes"]["forward"]
    assert outcome["status"] == WRONG and "from sdpa_math's at full size" in outcome["reason"]


@pytest.mark.parametrize("shape", ["1,2,2,96,128,32,causal", "1,2,1,96,64,32", "2,4,2,80,80,32,causal"])
def test_cut_rows_are_judged_where_the_oracle_is_too_large(run, monkeypatch, shape):
    monkeypatch.setattr("portable_flash.bench.checks.CPU_SCORES", 4096)
    code, results, _, _ = run("--shape", shape)
    errors = results["ours"]["outcomes"]["backward"]["errors"]
    assert code == 0 and "query_error_ratio" in errors and "key_error_ratio" not in errors
    assert "key_relative_to_sdpa_math" in errors


# ---------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    "argv, words",
    [
        (["--suite", "huge"], ["--suite", "huge", "peers"]),
        (["--peers", "fa9"], ["--peers", "'fa9'", "sdpa_flash"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bf16"]),
        (["--direction", "sideways"], ["--direction", "'sideways'", "forward and backward"]),
        (["--rounds", "0"], ["--rounds", "'0'", "from 1"]),
        (["--budget-ms", "x"], ["--budget-ms", "'x'", "from 1"]),
        (["--shape", "1,2,3"], ["--shape", "'1,2,3'", "B,Hq,Hk,Sq,Sk,D"]),
        (["--device", "tpu"], ["--device", "'tpu'", "cpu"]),
        (["--memory", "--hbm"], ["--hbm", "--memory"]),
        (["--host", "--plot", "x.png"], ["--plot", "'x.png'", "--memory"]),
    ],
)
def test_bad_arguments_name_argument_value_and_what_is_allowed(argv, words, capsys):
    with pytest.raises(SystemExit) as error:
        bench.main(argv)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench.main(["--plot", "x.png", "--device", "cpu"])
    assert "portable-flash[bench]" in capsys.readouterr().err
