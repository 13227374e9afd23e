//! Gradients of attention that PyTorch's autograd found in f64: `examples/data/torch_gradients`, whose script says how.

use crate::external::{data, dims, integers, shape, tensor};
use flashtile::gradients::{BackwardInputs, Gradients};
use flashtile::{
    Cpu, Inputs, MaskKind, Outputs, PlanOptions, Problem, ProblemDesc, QOffset, Sequences, Visibility,
    reference,
};
use flashtile_testkit::{CpuRunner, Guarded, GuardedList, GuardedMask, Layout, Runner};
use safetensors::SafeTensors;
use serde_json::Value;

/// Gradients by name, in the order of [`External::want`].
const GRADIENTS: [&str; 6] = ["d_q", "d_k", "d_v", "d_sinks", "d_bias", "d_alibi_slopes"];

/// One problem: inputs, gradients of the results, and the expected gradients of the inputs.
struct External {
    name: String,
    problem: Problem,
    q: Guarded,
    k: Guarded,
    v: Guarded,
    mask: Option<GuardedMask>,
    sinks: Option<GuardedList>,
    alibi_slopes: Option<GuardedList>,
    d_out: Guarded,
    d_lse: Option<GuardedList>,
    /// As [`GRADIENTS`]; empty where the problem has no such input.
    want: [Vec<f64>; 6],
}

impl External {
    fn inputs(&self) -> Inputs<'_> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs.mask = self.mask.as_ref().map(GuardedMask::view);
        inputs.sinks = self.sinks.as_ref().map(GuardedList::slice);
        inputs.alibi_slopes = self.alibi_slopes.as_ref().map(GuardedList::slice);
        inputs
    }

    fn d_lse(&self) -> Option<&[f32]> {
        self.d_lse.as_ref().map(GuardedList::slice)
    }
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Option<GuardedList> {
    let tensor = file.tensor(name).ok()?;
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    Some(GuardedList::of(&tensor.data().chunks_exact(4).map(number).collect::<Vec<f32>>()))
}

/// Numbers of a tensor in f64; empty if the file does not hold it.
fn f64s(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let Ok(tensor) = file.tensor(name) else { return Vec::new() };
    assert_eq!(tensor.dtype(), safetensors::Dtype::F64, "{name}");
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap());
    tensor.data().chunks_exact(8).map(number).collect()
}

fn mask(file: &SafeTensors<'_>) -> Option<GuardedMask> {
    let view = file.tensor("mask").ok()?;
    if view.dtype() != safetensors::Dtype::BOOL {
        return Some(GuardedMask::Additive(tensor(file, "mask")));
    }
    // Bytes lie in the order in which the indices come.
    let mut bytes = view.data().iter();
    let bias = |_| if *bytes.next().unwrap() == 0 { f32::NEG_INFINITY } else { 0.0 };
    Some(GuardedMask::new(MaskKind::Bool, shape(&view), Layout::Padded, bias))
}

/// The description without its tensors: attributes of a line of the manifest.
fn options(line: &Value, desc: &mut ProblemDesc) {
    let number = |key: &str| line[key].as_f64().map(|x| x as f32);
    let keys = |key: &str| line[key].as_u64().map(|n| usize::try_from(n).unwrap());
    let causal = if line["causal"].as_bool().unwrap() { Visibility::causal() } else { Visibility::full() };
    let window = Visibility::window(keys("window_left"), keys("window_right"));
    desc.visibility = causal.and(window).chunked(keys("chunk").unwrap_or(0));
    desc.q_offset = match &line["q_offset"] {
        Value::Null => None,
        Value::String(s) if s == "kv_len - q_len" => Some(QOffset::BottomRight),
        offset => Some(QOffset::At(offset.as_i64().unwrap())),
    };
    desc.scale = number("scale");
    desc.softcap = number("softcap");
}

fn read(line: &Value) -> External {
    let name = line["name"].as_str().unwrap();
    let bytes = std::fs::read(data(&format!("torch_gradients/{name}.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (q, k, v) = (tensor(&file, "q"), tensor(&file, "k"), tensor(&file, "v"));
    let (mask, sinks, alibi_slopes) = (mask(&file), f32s(&file, "sinks"), f32s(&file, "alibi_slopes"));
    let mut desc = ProblemDesc::new(dims(&q, &k, &v), q.dtype());
    options(line, &mut desc);
    (desc.sinks, desc.alibi) = (sinks.is_some(), alibi_slopes.is_some());
    desc.mask = mask.as_ref().map(|mask| mask.view().kind());
    if let Some(kv_lens) = integers(&file, "kv_lens") {
        desc.sequences = Sequences::Padded { kv_lens };
    }
    if let Some(cu_seqlens_q) = integers(&file, "cu_seqlens_q") {
        let cu_seqlens_k = integers(&file, "cu_seqlens_k").unwrap();
        desc.sequences = Sequences::Packed { cu_seqlens_q, cu_seqlens_k };
    }
    let problem = desc.validate().unwrap_or_else(|e| panic!("{name}: {e}"));
    let (d_out, d_lse) = (tensor(&file, "d_out"), f32s(&file, "d_lse"));
    let want = GRADIENTS.map(|name| f64s(&file, name));
    External { name: name.to_owned(), problem, q, k, v, mask, sinks, alibi_slopes, d_out, d_lse, want }
}

fn problems() -> Vec<External> {
    let text = std::fs::read_to_string(data("torch_gradients/manifest.jsonl")).unwrap();
    let problems: Vec<_> = text.lines().map(|line| read(&serde_json::from_str(line).unwrap())).collect();
    assert_eq!(problems.len(), 60);
    assert_eq!(problems.iter().filter(|external| external.d_lse.is_some()).count(), 30);
    problems
}

/// Gradients by a forward and a backward run of the CPU, with memory checked.
fn cpu_gradients(external: &External, cpu: &Cpu) -> [Vec<f64>; 6] {
    let (problem, dims) = (&external.problem, external.problem.dims());
    let new = |shape| Guarded::new(problem.dtype(), shape, Layout::Padded);
    let (mut out, mut lse) = (new(dims.out_shape()), GuardedList::new(dims.lse_shape().iter().product()));
    let mut outputs = Outputs::new(out.view_mut());
    outputs.lse = Some(lse.slice_mut());
    CpuRunner::new(*cpu).run(problem, &external.inputs(), &mut outputs).unwrap();

    let (mut d_q, mut d_k, mut d_v) = (new(dims.q_shape()), new(dims.k_shape()), new(dims.v_shape()));
    let [_, _, _, d_sinks, d_bias, d_alibi_slopes] = &external.want;
    let mut lists = [d_sinks, d_bias, d_alibi_slopes].map(|want| GuardedList::new(want.len()));
    let mut gradients = Gradients::new(d_q.view_mut(), d_k.view_mut(), d_v.view_mut());
    let [d_sinks, d_bias, d_alibi_slopes] = &mut lists;
    let wanted = |list| Some(GuardedList::slice_mut(list)).filter(|list| !list.is_empty());
    gradients.d_sinks = wanted(d_sinks);
    gradients.d_bias = wanted(d_bias);
    gradients.d_alibi_slopes = wanted(d_alibi_slopes);
    let plan = cpu.plan_backward(problem, PlanOptions::default()).unwrap();
    let (forward, d_out) = (external.inputs(), external.d_out.view());
    let inputs =
        BackwardInputs { forward, out: out.view(), lse: lse.slice(), d_out, d_lse: external.d_lse() };
    cpu.run_backward(&plan, &inputs, &mut gradients, &mut plan.workspace()).unwrap();

    assert!([&d_q, &d_k, &d_v].iter().all(|tensor| tensor.touched().is_none()), "{}", external.name);
    assert!(lists.iter().all(|list| list.touched().is_none()), "{}", external.name);
    let [d_sinks, d_bias, d_alibi_slopes] = lists.map(|list| list.slice().to_vec());
    let found = [d_q.values(), d_k.values(), d_v.values(), d_sinks, d_bias, d_alibi_slopes];
    found.map(|gradient| gradient.into_iter().map(f64::from).collect())
}

/// Largest difference, and largest magnitude of `want`.
fn max_abs(got: &[f64], want: &[f64]) -> [f64; 2] {
    let max = |numbers: &mut dyn Iterator<Item = f64>| {
        // f64::max ignores NaN.
        numbers.fold(0.0, |max: f64, x| if x.is_nan() { f64::INFINITY } else { max.max(x.abs()) })
    };
    [max(&mut got.iter().zip(want).map(|(got, want)| got - want)), max(&mut want.iter().copied())]
}

/// Root mean squares of the differences and of `want`.
fn root_mean_squares(got: &[f64], want: &[f64]) -> [f64; 2] {
    let root = |sum: f64| (sum / want.len() as f64).sqrt();
    let differences = got.iter().zip(want).map(|(got, want)| (got - want).powi(2)).sum();
    [root(differences), root(want.iter().map(|x| x * x).sum())]
}

/// How far each gradient may be from autograd's: `relative` of its size, or a floor where that is less, by a measure of both. The floors
/// are for gradients whose terms cancel, to exactly 0 in a row that sees one key.
struct Limit {
    relative: f64,
    /// For `d_q`, `d_k` and `d_v`.
    floor: f64,
    /// For lists, whose elements may be sums over all rows and keys of a problem.
    list_floor: f64,
    measure: fn(&[f64], &[f64]) -> [f64; 2],
}

impl Limit {
    /// Compares gradients, and returns the largest quotient of difference and limit.
    fn check(&self, by: &str, external: &External, got: &[Vec<f64>; 6], failures: &mut Vec<String>) -> f64 {
        let mut worst = 0.0f64;
        let floors = [[self.floor; 3], [self.list_floor; 3]].concat();
        for (((gradient, got), want), floor) in GRADIENTS.iter().zip(got).zip(&external.want).zip(floors) {
            let name = &external.name;
            assert_eq!(got.len(), want.len(), "{gradient} of {name}, {by}");
            if want.is_empty() {
                continue;
            }
            let [difference, size] = (self.measure)(got, want);
            let limit = (self.relative * size).max(floor);
            worst = worst.max(difference / limit);
            // A NaN fails too.
            if difference.is_nan() || difference > limit {
                failures.push(format!("{gradient} of {name}, {by}: {difference:e}, limit {limit:e}"));
            }
        }
        worst
    }
}

#[test]
fn the_oracle_matches_autograd() {
    let limit = Limit { relative: 1e-12, floor: 1e-14, list_floor: 1e-14, measure: max_abs };
    let (mut worst, mut failures) = (0.0f64, Vec::new());
    for external in problems() {
        let (inputs, d_out) = (external.inputs(), external.d_out.view());
        let found = reference::backward(&external.problem, &inputs, &d_out, external.d_lse()).unwrap();
        let found = [found.d_q, found.d_k, found.d_v, found.d_sinks, found.d_bias, found.d_alibi_slopes];
        worst = worst.max(limit.check("oracle", &external, &found, &mut failures));
    }
    println!("the largest difference is {worst:.1e} of its limit");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_instruction_set_matches_autograd() {
    // Terms of sums have magnitudes up to 10. Autograd in f32 errs by up to 1e-6 in lists that cancel.
    let limit = Limit { relative: 5e-6, floor: 2e-7, list_floor: 2e-6, measure: root_mean_squares };
    let (problems, mut failures) = (problems(), Vec::new());
    for isa in Cpu::isas() {
        let cpu = Cpu::with_isa(isa).unwrap();
        let mut worst = 0.0f64;
        for external in &problems {
            let found = cpu_gradients(external, &cpu);
            worst = worst.max(limit.check(&isa.to_string(), external, &found, &mut failures));
        }
        println!("{isa}: the largest difference is {worst:.2} of its limit");
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
