//! Commands on the simulator, where the build has it.

use crate::commands::ok;
use crate::examples::data;
use crate::files::{Folder, Tensor, max_abs, nrmse, qkv};
use crate::kernels::json_lines;
use safetensors::tensor::Dtype;

/// Runs every feature on the simulator, over elements and over codes, and compares with the CPU's kernels.
#[test]
fn the_simulator_agrees_with_the_cpu() {
    for (dtype, dim, limit) in [(Dtype::F32, 64, 2e-6), (Dtype::F16, 128, 1e-3), (Dtype::BF16, 64, 8e-3)] {
        let mut tensors = qkv(dtype, &[2, 4, 3, dim], &[2, 2, 37, dim], &[2, 2, 37, dim]);
        let hidden = (0..3 * 37).map(|n| n % 7 != 3);
        tensors.insert("mask".into(), Tensor::bool(&[1, 1, 3, 37], hidden));
        tensors.insert("alibi_slopes".into(), Tensor::f32(&[4], &[0.5, 0.25, 0.125, -0.01]));
        tensors.insert("sinks".into(), Tensor::f32(&[4], &[0.0, 1.0, -2.0, 3.0]));
        tensors.insert("kv_lens".into(), Tensor::i64(&[37, 11]));
        let folder = Folder::with(&tensors);
        let all = ["--causal", "--q-offset", "bottom-right", "--window", "20", "--softcap=2.5"];
        let codes = ["--k-codec", "int8", "--v-codec", "tq5", "--centre"];
        for (storage, limit) in [(&[][..], limit), (&codes[..], 8e-3)] {
            let run = |backend| folder.run(&[&all[..], storage, &["--backend", backend]].concat());
            let (got, want) = (run("simulator"), run("cpu"));
            assert_eq!((&got["out"].shape, &got["lse"].shape), (&want["out"].shape, &want["lse"].shape));
            let error = nrmse(&got["out"].values(), &want["out"].values());
            assert!(error <= limit, "{dtype:?} {storage:?}: {error}");
            let error = max_abs(&got["lse"].values(), &want["lse"].values());
            assert!(error <= 5e-3, "{dtype:?} {storage:?}: {error}");
        }
    }
}

#[test]
fn the_simulator_has_native_code_of_some_problems() {
    let folder = Folder::with(&qkv(Dtype::F16, &[1, 2, 3, 64], &[1, 2, 9, 64], &[1, 2, 9, 64]));
    let refuse = |options: &[&str], why| folder.refuse(&[options, &["--backend", "simulator"]].concat(), why);
    let why = "the simulator has no native code: q f16, keys tq3 of 64 and values f16 of 64, \
               expected elements of the dtype of q or int8, tq4, int8+tq5, of 64 or 128";
    refuse(&["--k-codec", "tq3"], why);
    let folder = Folder::with(&qkv(Dtype::F32, &[1, 2, 3, 80], &[1, 2, 9, 80], &[1, 2, 9, 80]));
    folder.refuse(&["--backend", "simulator"], "keys f32 of 80 and values f32 of 80, expected elements");
}

/// Gradients of every input agree with the CPU's.
#[test]
fn the_simulator_has_the_gradients_of_the_cpu() {
    for (dtype, dim, limit) in [(Dtype::F32, 64, 5e-6), (Dtype::BF16, 128, 2e-2)] {
        let mut tensors = qkv(dtype, &[2, 4, 5, dim], &[2, 2, 21, dim], &[2, 2, 21, dim]);
        tensors.insert("d_out".into(), Tensor::random(dtype, &[2, 4, 5, dim], 5));
        tensors.insert("d_lse".into(), Tensor::random(Dtype::F32, &[2, 4, 5], 6));
        tensors.insert("mask".into(), Tensor::random(Dtype::F32, &[1, 4, 5, 21], 7));
        tensors.insert("alibi_slopes".into(), Tensor::f32(&[4], &[0.5, 0.25, 0.125, -0.01]));
        tensors.insert("sinks".into(), Tensor::f32(&[4], &[0.0, 1.0, -2.0, 3.0]));
        tensors.insert("kv_lens".into(), Tensor::i64(&[21, 11]));
        let folder = Folder::with(&tensors);
        let all = ["--grad", "--causal", "--q-offset", "bottom-right", "--softcap=2.5"];
        let run = |backend| folder.run(&[&all[..], &["--backend", backend]].concat());
        let (got, want) = (run("simulator"), run("cpu"));
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        for name in ["d_q", "d_k", "d_v", "d_sinks", "d_bias", "d_alibi_slopes"] {
            assert_eq!(got[name].shape, want[name].shape, "{name}");
            let error = nrmse(&got[name].values(), &want[name].values());
            assert!(error <= limit, "{name} {dtype:?}: {error}");
        }
    }
}

#[test]
fn the_simulator_is_checked() {
    let results = json_lines(&[
        "check",
        "--backend",
        "simulator",
        "--filter",
        "decode_mask_f16,decode_batch_f16,softcap_50_f16",
        "--json",
    ]);
    let of = |what: &str| results.iter().filter(|result| result["result"] == what).collect::<Vec<_>>();
    assert!(of("failed").is_empty() && !of("passed").is_empty(), "{:?}", of("failed"));
    let why = of("skipped").iter().map(|result| result["reason"].to_string()).collect::<String>();
    assert!(why.contains("no native code") && why.contains("scores"), "{why}");

    let filter = "backward_edge_alibi_window_f16,backward_decode_1_group_16_of_16";
    let gradients = json_lines(&["check", "--backend", "simulator", "--filter", filter, "--json"]);
    let result = |case: &str| &gradients.iter().find(|result| result["case"] == case).unwrap()["result"];
    assert_eq!(result("backward_edge_alibi_window_f16"), "passed");
    assert_eq!(result("backward_decode_1_group_16_of_16"), "skipped");

    let text = ok(&["check", "--backend", "simulator", "--filter", "decode_batch_f16,head_dim_8"]);
    let line = " 7 skipped, the simulator has no native code, such as q f32, keys f32 of 8 and";
    assert!(text.contains(line), "{line} in {text}");
}

#[test]
fn the_simulator_refuses_what_would_take_long() {
    let folder = Folder::with(&qkv(Dtype::F16, &[1, 2, 600, 64], &[1, 2, 600, 64], &[1, 2, 600, 64]));
    let why = "720000 scores on the simulator, expected at most 600000";
    folder.refuse(&["--backend", "simulator"], why);
}

#[test]
fn options_that_are_refused() {
    let folder = Folder::with(&qkv(Dtype::F32, &[1, 2, 5, 8], &[1, 2, 5, 8], &[1, 2, 5, 8]));
    folder.refuse(
        &["--backend", "simulator"],
        "keys f32 of 8 and values f32 of 8, expected elements of the dtype of q",
    );
    let folder = Folder::with(&qkv(Dtype::F32, &[1, 2, 5, 64], &[1, 2, 5, 64], &[1, 2, 5, 64]));
    // There is native code for up to two splits, which gives the same answer but for rounding.
    let run = |splits| folder.run(&["--backend", "simulator", "--splits", splits]);
    let [one, more] = [run("1"), run("3")];
    assert!(nrmse(&one["out"].values(), &more["out"].values()) < 1e-6);
}

#[test]
fn the_example_runs() {
    let mut folder = Folder::empty();
    folder.input = data("small_f16.safetensors");
    let run = |backend| folder.run(&["--causal", "--q-offset", "bottom-right", "--backend", backend]);
    let (got, want) = (run("simulator"), run("reference"));
    let error = nrmse(&got["out"].values(), &want["out"].values());
    assert!(error <= 1e-3, "{error}");
}
