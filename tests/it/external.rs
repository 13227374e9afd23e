//! Data with expected answers from elsewhere, which tests the oracle as well as the kernels.

use crate::support::all_runners;
use flashtile::{
    Dims, Dtype, Inputs, MaskKind, MaskView, Outputs, PlanOptions, Problem, ProblemDesc, QOffset, Sequences,
    Visibility, reference,
};
use flashtile_testkit::{Guarded, GuardedList, Layout, Runner};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::PathBuf;

pub(crate) fn data(path: &str) -> PathBuf {
    // An environment variable of the run, not of the build: the test binary may come from another machine.
    let root = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let found =
        root.ancestors().map(|folder| folder.join("examples/data").join(path)).find(|file| file.exists());
    found.unwrap_or_else(|| panic!("examples/data/{path} is not in {} nor above", root.display()))
}

/// One file of examples/data: inputs, and the expected out.
struct External {
    problem: Problem,
    q: Guarded,
    k: Guarded,
    v: Guarded,
    mask: Option<Mask>,
    out: Guarded,
}

enum Mask {
    Bool(Vec<u8>, [usize; 4]),
    Additive(Guarded),
}

impl External {
    fn inputs(&self) -> Inputs<'_> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs.mask = self.mask.as_ref().map(|mask| match mask {
            Mask::Bool(bytes, shape) => {
                let [_, n1, n2, n3] = *shape;
                MaskView::bool_bytes(bytes, *shape, [n1 * n2 * n3, n2 * n3, n3, 1]).unwrap()
            }
            Mask::Additive(tensor) => MaskView::additive(tensor.view()),
        });
        inputs
    }
}

pub(crate) fn shape(tensor: &safetensors::tensor::TensorView<'_>) -> [usize; 4] {
    tensor.shape().try_into().unwrap()
}

/// A tensor of a file, in guarded memory.
pub(crate) fn tensor(file: &SafeTensors<'_>, name: &str) -> Guarded {
    let tensor = file.tensor(name).unwrap();
    let (dtype, size) = match tensor.dtype() {
        safetensors::Dtype::F32 => (Dtype::F32, 4),
        safetensors::Dtype::F16 => (Dtype::F16, 2),
        safetensors::Dtype::BF16 => (Dtype::BF16, 2),
        other => panic!("{name} is {other:?}"),
    };
    let mut guarded = Guarded::new(dtype, shape(&tensor), Layout::Padded);
    for (index, bytes) in guarded.indices().zip(tensor.data().chunks_exact(size)) {
        let x = match (dtype, bytes) {
            (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (_, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            _ => unreachable!("chunks of the element's size"),
        };
        guarded.set(index, x);
    }
    guarded
}

pub(crate) fn integers(file: &SafeTensors<'_>, name: &str) -> Option<Vec<usize>> {
    let tensor = file.tensor(name).ok()?;
    let integer = |bytes: &[u8]| usize::try_from(i64::from_le_bytes(bytes.try_into().unwrap())).unwrap();
    Some(tensor.data().chunks_exact(8).map(integer).collect())
}

pub(crate) fn dims(q: &Guarded, k: &Guarded, v: &Guarded) -> Dims {
    let ([batch, q_heads, q_len, head_dim], [_, kv_heads, kv_len, _]) = (q.shape(), k.shape());
    Dims { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim: v.shape()[3] }
}

fn onnx(line: &Value) -> External {
    let name = line["name"].as_str().unwrap();
    let bytes = std::fs::read(data(&format!("onnx_attention/{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (q, k, v, out) = (tensor(&file, "q"), tensor(&file, "k"), tensor(&file, "v"), tensor(&file, "out"));
    let mask = file.tensor("mask").ok().map(|view| match view.dtype() {
        safetensors::Dtype::BOOL => Mask::Bool(view.data().to_vec(), shape(&view)),
        _ => Mask::Additive(tensor(&file, "mask")),
    });

    let number = |key: &str| line[key].as_f64().map(|x| x as f32);
    let keys = |key: &str| line[key].as_u64().map(|n| usize::try_from(n).unwrap());
    let mut desc = ProblemDesc::new(dims(&q, &k, &v), q.dtype());
    let window = Visibility::window(keys("window_left"), keys("window_right"));
    let causal = if line["causal"].as_bool().unwrap() { Visibility::causal() } else { Visibility::full() };
    desc.visibility = causal.and(window);
    desc.q_offset = Some(match &line["q_offset"] {
        Value::String(s) if s == "kv_len - q_len" => QOffset::BottomRight,
        offset => QOffset::At(offset.as_i64().unwrap()),
    });
    desc.scale = number("scale");
    desc.softcap = number("softcap");
    desc.mask = mask.as_ref().map(|mask| match mask {
        Mask::Bool(..) => MaskKind::Bool,
        Mask::Additive(tensor) => MaskKind::Additive(tensor.dtype()),
    });
    if let Some(kv_lens) = integers(&file, "kv_lens") {
        desc.sequences = Sequences::Padded { kv_lens };
    }
    let problem = desc.validate().unwrap_or_else(|e| panic!("{name}: {e}"));
    External { problem, q, k, v, mask, out }
}

fn kernel_answer(external: &External, runner: &dyn Runner) -> (Guarded, GuardedList) {
    let dims = external.problem.dims();
    let mut out = Guarded::new(external.problem.dtype(), dims.out_shape(), Layout::Padded);
    let mut lse = GuardedList::new(dims.lse_shape().iter().product());
    let mut outputs = Outputs::new(out.view_mut());
    outputs.lse = Some(lse.slice_mut());
    runner.run(&external.problem, &external.inputs(), &mut outputs).unwrap();
    assert_eq!((out.touched(), lse.touched()), (None, None));
    (out, lse)
}

/// Largest difference; infinite if either side has a NaN.
fn max_abs(got: impl Iterator<Item = f64>, want: &[f64]) -> f64 {
    let far = |(got, &want): (f64, &f64)| {
        let difference = (got - want).abs();
        if got == want {
            0.0
        } else if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        }
    };
    got.zip(want).map(far).fold(0.0, f64::max)
}

fn wide(values: &[f32]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|&x| f64::from(x))
}

/// Root mean square difference relative to the root mean square of `want`.
fn nrmse(got: &[f32], want: &[f64]) -> f64 {
    let error: f64 = wide(got).zip(want).map(|(got, want)| (got - want).powi(2)).sum();
    (error / want.iter().map(|x| x * x).sum::<f64>()).sqrt()
}

fn manifest() -> Vec<Value> {
    let text = std::fs::read_to_string(data("onnx_attention/manifest.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn onnx_attention_cases() {
    let mut failures = Vec::new();
    let cases = manifest();
    assert_eq!(cases.len(), 62);
    for line in &cases {
        let external = onnx(line);
        let want: Vec<f64> = wide(&external.out.values()).collect();
        let limit = match external.problem.dtype() {
            Dtype::F32 => 1e-5,
            Dtype::F16 => 4e-3,
            Dtype::BF16 => 2e-2,
        };
        let mut check = |what: String, error: f64| {
            if error > limit {
                failures.push(format!("{} {what}: max-abs {error:e}, limit {limit:e}", line["name"]));
            }
        };
        let oracle = reference::attention(&external.problem, &external.inputs()).unwrap();
        check("oracle".to_owned(), max_abs(oracle.out.iter().copied(), &want));
        for runner in all_runners(PlanOptions::default()) {
            let (out, lse) = kernel_answer(&external, &*runner);
            check(runner.name(), max_abs(wide(&out.values()), &want));
            // The cases have no logsumexp; it is compared with the oracle, which was checked above.
            check(format!("{} lse", runner.name()), max_abs(wide(lse.slice()), &oracle.lse));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The MiniLM activations, including the padded keys as in the file, with the expected out and logsumexp.
fn minilm() -> (External, Vec<f64>, Vec<f64>) {
    let bytes = std::fs::read(data("minilm_attention.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (q, k, v, out) = (tensor(&file, "q"), tensor(&file, "k"), tensor(&file, "v"), tensor(&file, "out"));
    let lse = file.tensor("lse").unwrap();
    let number = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
    let lse: Vec<f64> = lse.data().chunks_exact(4).map(number).collect();
    let mut desc = ProblemDesc::new(dims(&q, &k, &v), q.dtype());
    desc.sequences = Sequences::Padded { kv_lens: integers(&file, "kv_lens").unwrap() };
    let problem = desc.validate().unwrap();
    let want = wide(&out.values()).collect();
    (External { problem, q, k, v, mask: None, out }, want, lse)
}

#[test]
fn minilm_activations() {
    let (external, out, lse) = minilm();
    let check = |what: &str, got_out: &[f32], got_lse: &[f32]| {
        assert_eq!((got_out.len(), got_lse.len()), (out.len(), lse.len()));
        let (out_error, lse_error) = (nrmse(got_out, &out), max_abs(wide(got_lse), &lse));
        println!("{what}: out nrmse {out_error:.2e}, lse max-abs {lse_error:.2e}");
        assert!(out_error <= 2e-6, "{what}: out nrmse {out_error:e}");
        assert!(lse_error <= 1e-5, "{what}: lse max-abs {lse_error:e}");
    };
    let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let oracle = reference::attention(&external.problem, &external.inputs()).unwrap();
    check("oracle", &narrow(&oracle.out), &narrow(&oracle.lse));
    for runner in all_runners(PlanOptions::default()) {
        let (got_out, got_lse) = kernel_answer(&external, &*runner);
        check(&runner.name(), &got_out.values(), got_lse.slice());
    }
}

#[test]
fn minilm_padding_is_never_read() {
    let (clean, ..) = minilm();
    let (mut poisoned, ..) = minilm();
    let mut padded = 0;
    for s in clean.problem.sequences() {
        for tensor in [&mut poisoned.k, &mut poisoned.v] {
            let [_, heads, rows, dim] = tensor.shape();
            for h in 0..heads {
                for row in s.kv_len..rows {
                    padded += 1;
                    for d in 0..dim {
                        tensor.set([s.batch, h, row, d], f32::NAN);
                    }
                }
            }
        }
    }
    assert!(padded > 0);
    for runner in all_runners(PlanOptions::default()) {
        let (a, b) = (kernel_answer(&clean, &*runner), kernel_answer(&poisoned, &*runner));
        assert_eq!(a.0.bits(), b.0.bits(), "{}", runner.name());
        let bits = |list: &GuardedList| list.slice().iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        assert_eq!(bits(&a.1), bits(&b.1), "{}", runner.name());
    }
    let oracle = |external: &External| reference::attention(&external.problem, &external.inputs()).unwrap();
    assert_eq!(oracle(&clean), oracle(&poisoned));
}
