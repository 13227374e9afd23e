"""`plan`, and `kv_report`."""

import numpy
import pytest
from flashtile import kv_report, plan
from test_attention import normal

LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "causal": True}


def test_a_plan():
    made = plan(**LLAMA, q_len=4096, window=(1023, 0), machine="avx512-64core")
    assert made["isa"] == "avx512" and made["threads"] == 64 and made["machine"] == "avx512-64core"
    assert made["problem"]["visibility"] == {"left": 1023, "right": 0}
    # Rows see 1, 2, .. 1024 keys, and 1024 from there on.
    assert made["visible_pairs"] == 1024 * 1025 // 2 + 3072 * 1024
    chunked = plan(**LLAMA, q_len=4096, attention_chunk=1024, machine="avx512-64core")
    assert chunked["problem"]["visibility"] == {"left": None, "right": 0, "chunk": 1024}
    assert chunked["visible_pairs"] == 4 * (1024 * 1025 // 2)
    assert plan(**LLAMA, q_len=8, attention_chunk=0, machine="h200")["visible_pairs"] == 8 * 9 // 2
    assert made["tasks"] > 64 and made["workspace_bytes"] > 0 and 0 <= made["idle"] < 1


def test_decoding_is_split():
    made = plan(**LLAMA, q_len=1, kv_len=65536, q_offset="bottom_right", machine="avx512-64core")
    assert made["splits"] > 1 and made["sequence_splits"] == [made["splits"]]
    assert plan(**LLAMA, q_len=1, kv_len=65536, q_offset=65535, splits=1)["splits"] == 1


def test_this_machine():
    made = plan(heads=2, q_len=4, head_dim=8, mask="bool", sinks=True, alibi=True, softcap=2.5, scale=0.5)
    assert made["machine"] == "this machine" and made["threads"] >= 1
    problem = made["problem"]
    assert (problem["mask"], problem["sinks"], problem["alibi"], problem["softcap"], problem["scale"]) == ("bool", True, True, 2.5, 0.5)
    assert plan(heads=2, q_len=4, head_dim=8, mask="f16")["problem"]["mask"] == {"additive": "f16"}
    assert plan(heads=2, batch=2, q_len=4, head_dim=8, kv_lens=[1, 4])["visible_pairs"] == 4 * 5
    assert plan(heads=2, q_len=4, head_dim=8, cu_seqlens=[0, 3, 4])["visible_pairs"] == 9 + 1


def test_a_plan_of_cuda():
    made = plan(**LLAMA, q_len=4096, machine="h200")
    assert (made["backend"], made["machine"], made["capability"]) == ("cuda", "h200", [9, 0])
    assert made["kernel"].startswith("cuda-prefill-bf16-d128") and made["kernel"] in made["summary"]
    (kernel,) = made["kernels"]
    assert kernel["kernel"] == made["kernel"] and kernel["threads"] >= 128 and made["workspace_bytes"] > 0
    # Compute capability 7.5 has the portable kernels alone.
    assert plan(**LLAMA, q_len=1, machine="t4")["kernel"] == "cuda-decode-bf16-d128-portable"


def test_backends():
    made = plan(**LLAMA, q_len=16, backend="cpu")
    assert (made["backend"], made["backend_reason"]) == ("cpu", "asked for")
    assert made["summary"] == plan(**LLAMA, q_len=16)["summary"]
    auto = plan(**LLAMA, q_len=16, backend="auto")
    # The sentence says why the device is not taken, or what both take.
    assert auto["backend"] in ("cpu", "cuda") and len(auto["backend_reason"]) > 20
    if auto["backend"] == "cpu":
        assert auto["summary"] == made["summary"]
    with pytest.raises(RuntimeError, match="driver|device"):
        plan(**LLAMA, q_len=16, backend="cuda:99")


def test_errors_of_plans():
    with pytest.raises(ValueError, match="machine and backend"):
        plan(**LLAMA, q_len=1, machine="h200", backend="cuda")
    with pytest.raises(ValueError, match="gpu"):
        plan(**LLAMA, q_len=1, backend="gpu")
    with pytest.raises(ValueError, match="q_offset"):
        plan(**LLAMA, q_len=1, kv_len=9)
    with pytest.raises(ValueError, match="machine is 'abacus', expected"):
        plan(**LLAMA, q_len=1, machine="abacus")
    with pytest.raises(ValueError, match="f64"):
        plan(heads=1, q_len=1, head_dim=8, dtype="f64")
    with pytest.raises(ValueError, match="splits"):
        plan(**LLAMA, q_len=1, splits=9)


@pytest.mark.parametrize(
    "given, error, text",
    [
        ({"dtype": "f64"}, ValueError, "dtype is 'f64', expected one of f32, f16, bf16$"),
        ({"mask": "int8"}, ValueError, "mask is 'int8', expected one of bool, f32, f16, bf16$"),
        ({"head_dim": "64"}, TypeError, "head_dim is '64', expected an integer"),
        ({"heads": 1.5}, TypeError, "heads is 1.5, expected an integer"),
        ({"window": (-2, 0)}, ValueError, "window is -2, expected 0 or more"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk is -1, expected 0 or more"),
        ({"causal": True, "kv_len": 9, "q_offset": "left"}, ValueError, "q_offset is 'left', expected 'top_left', 'bottom_right' or the key"),
        ({"causal": True, "kv_len": 9}, ValueError, "needs q_offset: 'top_left', 'bottom_right' or the key position of query 0"),
    ],
)
def test_wrong_arguments_are_named(given, error, text):
    with pytest.raises(error, match=text):
        plan(**({"heads": 2, "q_len": 1, "head_dim": 64} | given))
    assert plan(heads=numpy.int64(2), q_len=numpy.int32(1), head_dim=64, q_offset=numpy.int64(0))["summary"]


def test_a_report(rng):
    q, k, v = normal(rng, 2, 4, 20, 64), normal(rng, 2, 2, 20, 64), normal(rng, 2, 2, 20, 32)
    k[:, 1] += 5
    report = kv_report({"layer.0.q": q, "layer.0.k": k, "layer.0.v": v, "1.key": k, "1.value": v}, causal=True, codecs=["f16", "int8", "tq3"])
    first, second = report["pairs"]
    assert (first["name"], first["tokens"], first["queries"]) == ("layer.0", 40, 2 * 4 * 20)
    assert [(of["codec"], of["centered"]) for of in first["keys"]] == [("f16", False), ("int8", False), ("int8", True), ("tq3", False), ("tq3", True)]
    f16, int8, centered, tq3, tq3_centered = (of["kl"] for of in first["keys"])
    # A mean of the keys costs bits, unless it is subtracted.
    assert f16 < centered < int8 < tq3 and tq3_centered < tq3
    k[..., 3] *= 30
    (pair,) = kv_report({"q": q, "k": k, "v": v}, causal=True, codecs=["fp8", "tq3"], equalize=0.5)["pairs"]
    assert [(of["codec"], of["centered"], of["equalized"]) for of in pair["keys"]] == [
        ("fp8", False, False), ("fp8", True, False), ("tq3", False, False), ("tq3", True, False), ("tq3", True, True)
    ]
    assert pair["keys"][4]["logit_rmse"] < 0.7 * pair["keys"][3]["logit_rmse"]
    assert first["values"][1]["bits"] == 8 * 34 / 32
    errors = numpy.array(first["nrmse"])
    assert errors.shape == (5, 3) and (errors > 0).all() and (errors[:, 0] < errors[:, 2]).all()
    assert second["queries"] == 0 and second["keys"][0]["kl"] is None and second["keys"][0]["error"] == first["keys"][0]["error"]
    assert second["nrmse"][0] == [None, None, None]


def test_a_report_of_kept_tokens(rng):
    q, k, v = normal(rng, 1, 2, 90, 32), normal(rng, 1, 1, 90, 32), normal(rng, 1, 1, 90, 32)

    def kl(**options):
        return kv_report({"q": q, "k": k, "v": v}, causal=True, codecs=["tq3"], **options)["pairs"][0]["keys"][0]["kl"]

    assert 0 < kl(keep_first=4, keep_last=40) < kl(keep_last=40) < kl()
    # All keys that a window sees are kept.
    assert kl(window=(15, 0), keep_last=16) == 0 < kl(window=(15, 0), keep_last=15)


def test_a_row_that_is_refused(rng):
    k, v = normal(rng, 1, 1, 4, 16), normal(rng, 1, 1, 4, 16)
    k[0, 0, 2] = numpy.inf
    (pair,) = kv_report({"k": k, "v": v}, codecs=["int8"])["pairs"]
    assert "row 2 of k" in pair["keys"][0]["refused"] and pair["values"][0]["error"] > 0


def test_errors_of_reports(rng):
    k = normal(rng, 1, 1, 4, 16)
    with pytest.raises(ValueError, match="'mask' is neither"):
        kv_report({"k": k, "v": k, "mask": k})
    with pytest.raises(ValueError, match="equalize is 3, expected a power from 0 to 2"):
        kv_report({"k": k, "v": k}, equalize=3)
    with pytest.raises(ValueError, match="keep_last is -1, expected at least 0"):
        kv_report({"k": k, "v": k}, keep_last=-1)
    with pytest.raises(ValueError, match="'a' has k, expected k and v"):
        kv_report({"a.k": k})
    with pytest.raises(ValueError, match="'a.keys' is a second k"):
        kv_report({"a.k": k, "a.keys": k})
    with pytest.raises(ValueError, match="int9"):
        kv_report({"k": k, "v": k}, codecs=["int9"])
    with pytest.raises(ValueError, match="v has shape"):
        kv_report({"k": k, "v": k[:, :, 1:]})
