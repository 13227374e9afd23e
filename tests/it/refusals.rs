//! Every refusal: what provokes it, and that its message has the values.

use crate::support::{build, options};
use flashtile::cache::NO_PAGE;
use flashtile::plan::{Isa, machines};
use flashtile::problem::{MAX_HEAD_DIM, MAX_LEN, MAX_SCALE, MAX_SEQUENCES, MAX_SOFTCAP};
use flashtile::{
    BlockTables, Cpu, CpuPlan, Dtype, Inputs, MaskKind, MaskView, Outputs, PlanOptions, ProblemDesc,
    ProblemError, QOffset, RunError, Sequences, TensorView, TensorViewMut, Unsupported, ViewError,
    Visibility, Workspace,
};
use flashtile_testkit::{Case, CpuRunner, Guarded, Keep, Layout, MaskFill, Tree};

fn case() -> Case {
    Case::new("refusal", [2, 4, 2, 5, 9, 8, 6], Dtype::F32)
}

fn desc() -> ProblemDesc {
    case().desc
}

/// Checks the message of the refusal of the description that `change` makes.
fn refused(change: impl FnOnce(&mut ProblemDesc), message: &str) {
    let mut desc = desc();
    change(&mut desc);
    match desc.clone().validate() {
        Ok(_) => panic!("accepted: {desc:?}"),
        Err(error) => assert_eq!(error.to_string(), message),
    }
}

#[test]
fn heads() {
    refused(|d| d.dims.kv_heads = 3, "q_heads 4 is not a positive multiple of kv_heads 3");
    refused(|d| d.dims.kv_heads = 0, "q_heads 4 is not a positive multiple of kv_heads 0");
    refused(|d| d.dims.q_heads = 0, "q_heads 0 is not a positive multiple of kv_heads 2");
    refused(|d| d.dims.q_heads = 1, "q_heads 1 is not a positive multiple of kv_heads 2");
}

#[test]
fn dimensions() {
    refused(|d| d.dims.head_dim = 0, "head_dim 0 is outside 1..=512");
    refused(|d| d.dims.value_dim = MAX_HEAD_DIM + 1, "value_dim 513 is outside 1..=512");
    let long = MAX_LEN + 1;
    refused(|d| d.dims.batch = MAX_SEQUENCES + 1, "batch 4194305 is above 4194304");
    refused(|d| d.dims.q_len = long, "q_len 2147483648 is above 2147483647");
    refused(|d| d.dims.kv_len = long, "kv_len 2147483648 is above 2147483647");
    refused(
        |d| (d.dims.q_heads, d.dims.kv_heads) = (2 * long, long),
        "q_heads 4294967296 is above 2147483647",
    );
    refused(
        |d| (d.dims.batch, d.dims.q_len, d.dims.head_dim) = (MAX_SEQUENCES, MAX_LEN, 512),
        "q [4194304, 4, 2147483647, 512] is not addressable",
    );
    refused(
        |d| (d.dims.batch, d.dims.kv_len, d.dims.head_dim) = (MAX_SEQUENCES, MAX_LEN, 512),
        "k [4194304, 2, 2147483647, 512] is not addressable",
    );
    refused(
        |d| (d.dims.batch, d.dims.kv_len, d.dims.value_dim) = (MAX_SEQUENCES, MAX_LEN, 512),
        "v [4194304, 2, 2147483647, 512] is not addressable",
    );
    refused(
        |d| (d.dims.batch, d.dims.q_len, d.dims.value_dim) = (MAX_SEQUENCES, MAX_LEN, 512),
        "out [4194304, 4, 2147483647, 512] is not addressable",
    );
}

#[test]
fn numbers() {
    refused(|d| d.scale = Some(f32::NAN), "scale NaN is not finite");
    refused(|d| d.scale = Some(f32::NEG_INFINITY), "scale -inf is not finite");
    refused(
        |d| d.scale = Some(3e38),
        "scale 3e38 is outside -1.9342813e25..=1.9342813e25: scores would overflow f32",
    );
    refused(
        |d| (d.scale, d.softcap) = (Some(10.0), Some(1e-38)),
        "scale 1e1 / softcap 1e-38 is outside -1.9342813e25..=1.9342813e25: scores would overflow f32",
    );
    refused(
        |d| (d.scale, d.softcap) = (Some(1.0), Some(2e19)),
        "softcap 2e19 is above 1.8446744e19: scale / softcap would underflow f32",
    );
    for scale in [-MAX_SCALE, MAX_SCALE] {
        let mut desc = case().desc;
        desc.scale = Some(scale);
        assert_eq!(desc.clone().validate().unwrap().scale(), scale);
        desc.scale = Some(scale * (1.0 + f32::EPSILON));
        assert!(matches!(desc.validate(), Err(ProblemError::ScaleRange { .. })));
    }
    let mut desc = case().desc;
    desc.softcap = Some(MAX_SOFTCAP);
    desc.validate().unwrap();
    for (softcap, message) in [
        (0.0, "softcap 0 is not a positive finite number"),
        (-1.5, "softcap -1.5 is not a positive finite number"),
        (f32::NAN, "softcap NaN is not a positive finite number"),
        (f32::INFINITY, "softcap inf is not a positive finite number"),
    ] {
        refused(|d| d.softcap = Some(softcap), message);
    }
}

#[test]
fn unsaid_offsets() {
    let tail = "with q_len 5 and kv_len 9 needs q_offset: top-left, bottom-right or a number";
    refused(|d| d.visibility = Visibility::causal(), &format!("causal {tail}"));
    refused(|d| d.visibility = Visibility::window(Some(3), Some(0)), &format!("window {tail}"));
    refused(|d| d.visibility = Visibility::window(None, Some(2)), &format!("window {tail}"));
    refused(|d| d.alibi = true, &format!("ALiBi {tail}"));
    let padded = |d: &mut ProblemDesc| {
        d.dims.q_len = 9;
        d.sequences = Sequences::Padded { kv_lens: vec![9, 9] };
    };
    let tail = "with kv_lens needs q_offset: top-left, bottom-right or a number";
    for (feature, visibility) in
        [("causal", Visibility::causal()), ("window", Visibility::window(Some(1), None))]
    {
        refused(
            |d| {
                padded(d);
                d.visibility = visibility;
            },
            &format!("{feature} {tail}"),
        );
    }
    refused(
        |d| {
            padded(d);
            d.alibi = true;
        },
        &format!("ALiBi {tail}"),
    );
    for offset in [MAX_LEN as i64 + 1, -(MAX_LEN as i64) - 1, i64::MIN, i64::MAX] {
        refused(
            |d| d.q_offset = Some(QOffset::At(offset)),
            &format!("q_offset {offset} is outside -2147483647..=2147483647"),
        );
    }
}

#[test]
fn lengths() {
    let padded = |kv_lens: &[usize]| Sequences::Padded { kv_lens: kv_lens.to_vec() };
    refused(|d| d.sequences = padded(&[1]), "kv_lens has 1 entries, expected 2, one per batch entry");
    refused(|d| d.sequences = padded(&[9, 10]), "kv_lens[1] is 10, expected at most the 9 rows of k and v");
    let packed = |q: &[usize], k: &[usize]| {
        let (cu_seqlens_q, cu_seqlens_k) = (q.to_vec(), k.to_vec());
        move |d: &mut ProblemDesc| {
            d.dims.batch = 1;
            d.sequences = Sequences::Packed { cu_seqlens_q, cu_seqlens_k };
        }
    };
    refused(
        |d| d.sequences = Sequences::Packed { cu_seqlens_q: vec![0, 5], cu_seqlens_k: vec![0, 9] },
        "packed sequences need tensors with 1 batch entry, got 2",
    );
    refused(
        packed(&[0, 5], &[0, 4, 9]),
        "cu_seqlens_q has 2 entries and cu_seqlens_k has 3, expected the same number",
    );
    refused(packed(&[], &[]), "cu_seqlens_q is empty, expected at least [0]");
    refused(packed(&[1, 5], &[0, 9]), "cu_seqlens_q starts at 1, expected 0");
    refused(packed(&[0, 5], &[2, 9]), "cu_seqlens_k starts at 2, expected 0");
    refused(packed(&[0, 4, 3, 5], &[0, 1, 2, 9]), "cu_seqlens_q[2] is 3 after 4, expected at least 4");
    refused(packed(&[0, 5], &[0, 8]), "cu_seqlens_k ends at 8, expected the 9 rows of the tensor");
    refused(packed(&[0, 6], &[0, 9]), "cu_seqlens_q ends at 6, expected the 5 rows of the tensor");
    refused(packed(&[0], &[0]), "cu_seqlens_q ends at 0, expected the 5 rows of the tensor");
}

#[test]
fn views() {
    let message = |error: ViewError| error.to_string();
    let mut data = [0.0f32; 23];
    assert_eq!(
        message(TensorView::bhsd(&data, [1, 2, 3, 4]).unwrap_err()),
        "view reaches 24 elements, memory holds 23"
    );
    assert_eq!(
        message(TensorView::packed(&data, [4, 3, 2]).unwrap_err()),
        "view reaches 24 elements, memory holds 23"
    );
    assert_eq!(
        message(TensorView::strided(&data, [2, 1, 1, 1], [usize::MAX, 1, 1, 1]).unwrap_err()),
        "shape times strides is not addressable"
    );
    assert_eq!(
        message(TensorView::bhsd(&data, [usize::MAX; 4]).unwrap_err()),
        "shape times strides is not addressable"
    );
    assert_eq!(
        message(TensorView::strided(&data, [1, 1, 1, 2], [2, 2, 2, 2]).unwrap_err()),
        "innermost stride is 2, expected 1"
    );
    assert_eq!(
        message(TensorViewMut::strided(&mut data, [1, 2, 3, 3], [9, 2, 3, 1]).unwrap_err()),
        "elements overlap under strides [9, 2, 3, 1]"
    );
    assert_eq!(
        message(TensorViewMut::strided(&mut data, [2, 1, 1, 3], [0, 3, 3, 1]).unwrap_err()),
        "elements overlap under strides [0, 3, 3, 1]"
    );
    let mut bytes = [0u8; 24];
    let odd = 1 - bytes.as_ptr() as usize % 2;
    let strides = [4, 4, 4, 1];
    assert_eq!(
        message(TensorView::from_bytes(Dtype::BF16, &bytes[odd..], [1, 1, 1, 4], strides).unwrap_err()),
        "memory is not aligned to the 2 bytes of bf16"
    );
    assert_eq!(
        message(TensorViewMut::from_bytes(Dtype::F32, &mut bytes[odd..], [1, 1, 1, 4], strides).unwrap_err()),
        "memory is not aligned to the 4 bytes of f32"
    );
    assert_eq!(
        message(MaskView::dense_bool(&[true; 5], [1, 1, 2, 3]).unwrap_err()),
        "view reaches 6 elements, memory holds 5"
    );
    assert_eq!(
        message(MaskView::bool_bytes(&[1; 11], [1, 1, 2, 3], [11, 11, 6, 2]).unwrap_err()),
        "innermost stride is 2, expected 1"
    );
}

#[test]
fn plans() {
    let problem = Case::new("plan", [1, 1, 1, 1, 513, 8, 8], Dtype::F32).desc.validate().unwrap();
    let plan = |options| CpuPlan::new(&problem, &machines::AVX2_8, options);
    let max = 513usize.div_ceil(plan(PlanOptions::default()).unwrap().block_k());
    assert!(plan(options(Some(max), true)).is_ok());
    for got in [0, max + 1, usize::MAX] {
        assert_eq!(
            plan(options(Some(got), true)).unwrap_err().to_string(),
            format!("{got} splits asked for, expected 1 to {max}")
        );
    }
    let many = Case::new("plan", [1, 1 << 23, 1 << 23, 1, 1, 8, 8], Dtype::F32).desc.validate().unwrap();
    assert_eq!(
        CpuPlan::new(&many, &machines::AVX2_8, PlanOptions::default()).unwrap_err().to_string(),
        "8388608 tasks, expected at most 4194304"
    );
    // Memory runs out before a problem is this large, so that only the message can be tested.
    let workspace = Unsupported::Workspace { kernel: "cpu-prefill-f32-d8-avx2".to_owned() };
    assert_eq!(workspace.to_string(), "cpu-prefill-f32-d8-avx2: the workspace is not addressable");
}

#[test]
fn instruction_sets() {
    let best = Cpu::isas()[0];
    let better = Isa::ALL.into_iter().filter(|&isa| !best.contains(isa));
    for asked in better {
        assert_eq!(
            Cpu::with_isa(asked).unwrap_err().to_string(),
            format!("{asked} asked for, the best of this machine is {best}")
        );
    }
    // A plan for an instruction set that a restricted Cpu does not use.
    let built = build(&case());
    let facts = machines::AVX512_2;
    let plan = CpuPlan::new(&built.problem, &facts, PlanOptions::default()).unwrap();
    let error = run(&Cpu::with_isa(Isa::Portable).unwrap(), &plan, &built.inputs());
    assert_eq!(error.to_string(), format!("{} needs instructions that this Cpu does not use", plan.kernel()));
}

/// The refusal of a run, whose output must stay unchanged.
fn run(cpu: &Cpu, plan: &CpuPlan, inputs: &Inputs<'_>) -> RunError {
    let mut out = Guarded::new(Dtype::F32, plan.problem().dims().out_shape(), Layout::Bhsd);
    let before = out.bits();
    let error = cpu.run(plan, inputs, &mut Outputs::new(out.view_mut()), &mut plan.workspace()).unwrap_err();
    assert_eq!(out.bits(), before, "{error}: the output was written");
    error
}

/// Checks the message of the refusal of the inputs that `change` makes, by a kernel and by the oracle.
fn inputs_refused(case: &Case, change: impl for<'a> Fn(&mut Inputs<'a>, &'a Spare), message: &str) {
    let spare = Spare::new();
    let built = build(case);
    let mut inputs = built.inputs();
    change(&mut inputs, &spare);
    for cpu in Cpu::isas().into_iter().map(|isa| Cpu::with_isa(isa).unwrap()) {
        let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
        assert_eq!(run(&cpu, &plan, &inputs).to_string(), message);
    }
    assert_eq!(flashtile::reference::attention(&built.problem, &inputs).unwrap_err().to_string(), message);
}

/// Tensors that match no problem.
struct Spare {
    f32: Guarded,
    f16: Guarded,
    list: [f32; 3],
    bools: [bool; 2 * 4 * 5 * 8],
}

impl Spare {
    fn new() -> Self {
        Self {
            f32: Guarded::new(Dtype::F32, [2, 2, 9, 7], Layout::Bhsd),
            f16: Guarded::new(Dtype::F16, [2, 4, 5, 8], Layout::Bhsd),
            list: [0.0; 3],
            bools: [true; 2 * 4 * 5 * 8],
        }
    }
}

#[test]
fn tensors() {
    inputs_refused(
        &case(),
        |inputs, spare| inputs.q = spare.f32.view(),
        "q has shape [2, 2, 9, 7], expected [2, 4, 5, 8]",
    );
    inputs_refused(
        &case(),
        |inputs, spare| inputs.k = spare.f32.view().into(),
        "k has shape [2, 2, 9, 7], expected [2, 2, 9, 8]",
    );
    inputs_refused(
        &case(),
        |inputs, spare| inputs.v = spare.f32.view().into(),
        "v has shape [2, 2, 9, 7], expected [2, 2, 9, 6]",
    );
    inputs_refused(&case(), |inputs, spare| inputs.q = spare.f16.view(), "q is f16, expected f32");
}

#[test]
fn lists() {
    let positioned = || case().at(QOffset::TopLeft);
    inputs_refused(
        &positioned().alibi(),
        |inputs, _| inputs.alibi_slopes = None,
        "alibi_slopes is missing: the problem has it",
    );
    inputs_refused(
        &positioned().alibi(),
        |inputs, spare| inputs.alibi_slopes = Some(&spare.list),
        "alibi_slopes has 3 elements, expected 4",
    );
    inputs_refused(
        &case(),
        |inputs, spare| inputs.alibi_slopes = Some(&spare.list),
        "alibi_slopes was given but the problem does not have it",
    );
    inputs_refused(&case().sinks(), |inputs, _| inputs.sinks = None, "sinks is missing: the problem has it");
    inputs_refused(
        &case().sinks(),
        |inputs, spare| inputs.sinks = Some(&spare.list),
        "sinks has 3 elements, expected 4",
    );
    inputs_refused(
        &case(),
        |inputs, spare| inputs.sinks = Some(&spare.list),
        "sinks was given but the problem does not have it",
    );
}

#[test]
fn masks() {
    let masked = |kind| case().mask(kind, "", MaskFill::Random);
    inputs_refused(
        &masked(MaskKind::Bool),
        |inputs, _| inputs.mask = None,
        "mask is missing: the problem has it",
    );
    inputs_refused(
        &case(),
        |inputs, spare| inputs.mask = Some(MaskView::additive(spare.f32.view())),
        "mask was given but the problem does not have it",
    );
    inputs_refused(
        &masked(MaskKind::Bool),
        |inputs, spare| inputs.mask = Some(MaskView::additive(spare.f16.view())),
        "mask is additive f16, expected bool",
    );
    inputs_refused(
        &masked(MaskKind::Additive(Dtype::F32)),
        |inputs, spare| inputs.mask = Some(MaskView::additive(spare.f16.view())),
        "mask is additive f16, expected additive f32",
    );
    inputs_refused(
        &masked(MaskKind::Bool),
        |inputs, spare| inputs.mask = Some(MaskView::dense_bool(&spare.bools, [2, 4, 5, 8]).unwrap()),
        "mask has shape [2, 4, 5, 8], expected [2, 4, 5, 9] with any axis 1",
    );
    inputs_refused(
        &masked(MaskKind::Bool),
        |inputs, spare| inputs.mask = Some(MaskView::dense_bool(&spare.bools, [1, 2, 1, 9]).unwrap()),
        "mask has shape [1, 2, 1, 9], expected [2, 4, 5, 9] with any axis 1",
    );
}

/// Cached sequences of lengths 20, 9 and 0 with 3, 1 and 0 queries.
fn cached() -> Case {
    Case::new("refusal", [1, 4, 2, 0, 0, 8, 6], Dtype::F32).cached(&[(3, 20), (1, 9), (0, 0)], 4, Keep::All)
}

#[test]
fn cached_sequences() {
    let refused = |change: &dyn Fn(&mut ProblemDesc), message: &str| {
        let mut desc = cached().desc;
        change(&mut desc);
        assert_eq!(desc.validate().unwrap_err().to_string(), message);
    };
    let with = |cu: &[usize], kv: &[usize]| {
        let (cu_seqlens_q, kv_lens) = (cu.to_vec(), kv.to_vec());
        move |d: &mut ProblemDesc| {
            d.sequences = Sequences::Cached { cu_seqlens_q: cu_seqlens_q.clone(), kv_lens: kv_lens.clone() };
        }
    };
    refused(&|d| d.dims.batch = 2, "packed sequences need tensors with 1 batch entry, got 2");
    let one_fewer = "expected one fewer";
    refused(&with(&[0, 4], &[1, 2]), &format!("cu_seqlens_q has 2 entries and kv_lens has 2, {one_fewer}"));
    refused(&with(&[0, 1, 4], &[1]), &format!("cu_seqlens_q has 3 entries and kv_lens has 1, {one_fewer}"));
    refused(&with(&[], &[]), &format!("cu_seqlens_q has 0 entries and kv_lens has 0, {one_fewer}"));
    refused(&with(&[1, 4], &[20]), "cu_seqlens_q starts at 1, expected 0");
    refused(&with(&[0, 3, 2, 4], &[1, 1, 1]), "cu_seqlens_q[2] is 2 after 3, expected at least 3");
    refused(&with(&[0, 3], &[1]), "cu_seqlens_q ends at 3, expected the 4 rows of the tensor");
    refused(&with(&[0, 3, 4], &[20, 21]), "kv_lens[1] is 21, expected at most kv_len 20");
    let many = MAX_SEQUENCES + 1;
    refused(&with(&vec![0; many + 1], &vec![0; many]), "sequences 4194305 is above 4194304");
    let tail = "with kv_lens needs q_offset: top-left, bottom-right or a number";
    refused(&|d| d.visibility = Visibility::causal(), &format!("causal {tail}"));
    refused(&|d| d.alibi = true, &format!("ALiBi {tail}"));
    let tree = with(&[0, 3, 4], &[2, 9]);
    refused(
        &|d| {
            tree(d);
            d.tree = true;
        },
        "tree mask over sequence 0: q_len 3 is above kv_len 2",
    );
    let mut desc = desc();
    desc.tree = true;
    assert_eq!(desc.validate().unwrap_err().to_string(), "a tree mask needs cached sequences");
}

#[test]
fn tables() {
    /// Checks the message of the refusal of tables that `change` makes, by every kernel and by the oracle.
    fn refused(case: &Case, change: impl Fn(&mut BlockTables), message: &str) {
        let built = build(case);
        let mut tables = built.tables.clone().unwrap();
        change(&mut tables);
        let mut inputs = built.inputs();
        inputs.tables = Some(&tables);
        for cpu in Cpu::isas().into_iter().map(|isa| Cpu::with_isa(isa).unwrap()) {
            let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
            assert_eq!(run(&cpu, &plan, &inputs).to_string(), message);
        }
        let error = flashtile::reference::attention(&built.problem, &inputs).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!(std::error::Error::source(&error).is_some(), matches!(error, RunError::Tables(_)));
    }
    inputs_refused(&cached(), |inputs, _| inputs.tables = None, "tables is missing: the problem has it");
    let given = BlockTables::default();
    let built = build(&case());
    let mut inputs = built.inputs();
    inputs.tables = Some(&given);
    let message = "tables was given but the problem does not have it";
    assert_eq!(flashtile::reference::attention(&built.problem, &inputs).unwrap_err().to_string(), message);

    let causal = cached().causal(QOffset::BottomRight);
    refused(&causal, |t| t.lens.truncate(2), "tables.lens has 2 elements, expected 3");
    refused(&causal, |t| t.lens[1] = 8, "tables: sequence 1 has length 8, the problem's kv_lens say 9");
    refused(&causal, |t| t.first.truncate(2), "tables: first has 2 entries, expected 3");
    refused(&causal, |t| t.table.truncate(14), "tables: table has 14 entries, expected 15");
    refused(&causal, |t| t.first[1] = 10, "tables: sequence 1 keeps tokens from 10, its length is 9");
    refused(&causal, |t| t.table[2] = 11, "tables: block 2 of sequence 0 is page 11, the pool has 11");
    refused(&causal, |t| t.table[5] = NO_PAGE, "tables: block 0 of sequence 1 has no page");
    refused(
        &causal,
        |t| (t.width, t.table) = (4, vec![0; 12]),
        "tables: sequence 0 keeps 20 tokens, its pages hold 16",
    );
    refused(
        &causal,
        |t| (t.width, t.table, t.first) = (4, vec![0; 12], vec![5, 0, 0]),
        "tables: sequence 0 has length 20, a table that does not wrap reaches 16",
    );
    let not_kept = |what: &str, first: usize| {
        format!(
            "{what}, the first kept is {first}: expected a window that hides keys before {first}, a ring with a capacity \
             of window + query rows, or fewer tokens forgotten"
        )
    };
    refused(&causal, |t| t.first[0] = 1, &not_kept("query row 0 of sequence 0 sees key 0", 1));
    let banded = causal.clone().seeing(Visibility::window(Some(5), None));
    refused(&banded, |t| t.first[0] = 13, &not_kept("query row 0 of sequence 0 sees key 12", 13));
    refused(&banded, |t| t.first[1] = 9, &not_kept("query row 0 of sequence 1 sees key 3", 9));
    let late = cached().causal(QOffset::At(-2));
    refused(&late, |t| t.first[0] = 3, &not_kept("query row 2 of sequence 0 sees key 0", 3));
    refused(&causal, |t| t.page_size = 5, "k has shape [11, 2, 4, 8], expected [11, 2, 5, 8]");
}

#[test]
fn prefixes() {
    let of = |list: &[(std::ops::Range<usize>, usize)]| {
        let lengths = &[(1, 20), (1, 12), (2, 12), (1, 30)];
        let case = Case::new("refusal", [1, 4, 2, 0, 0, 8, 6], Dtype::F32).cached(lengths, 4, Keep::All);
        case.shared(list)
    };
    let refused =
        |case: Case, message: &str| assert_eq!(case.desc.validate().unwrap_err().to_string(), message);
    refused(case().shared(&[(0..2, 3)]), "shared prefixes need cached sequences");
    for (sequences, text) in [(2..2, "2..2"), (0..5, "0..5"), (4..6, "4..6")] {
        let message = format!("prefixes[1] is of sequences {text}, expected a range within 0..4");
        refused(of(&[(0..1, 3), (sequences, 3)]), &message);
    }
    #[allow(clippy::reversed_empty_ranges)]
    refused(of(&[(3..1, 3)]), "prefixes[0] is of sequences 3..1, expected a range within 0..4");
    refused(of(&[(0..3, 13)]), "prefixes[0] has 13 tokens, sequence 1 has 12");
    let order = "is neither inside nor after the one before it, or is shorter than a prefix that contains it";
    for list in [
        &[(1..3, 4), (0..1, 4)][..],
        &[(0..2, 4), (1..3, 4)],
        &[(0..3, 8), (0..2, 7)],
        &[(0..4, 4), (0..2, 6), (1..3, 8)],
    ] {
        refused(of(list), &format!("prefixes[{}] {order}", list.len() - 1));
    }
    of(&[(0..4, 4), (0..2, 8), (0..2, 8), (1..2, 12), (2..4, 4), (3..4, 30)]).desc.validate().unwrap();

    // Tables in which one sequence has its own page for the prefix.
    let built = build(&of(&[(0..4, 4), (1..3, 9)]));
    for (sequence, block, index, token) in [(3, 0, 0, 0), (2, 0, 0, 0), (2, 1, 1, 4), (2, 2, 1, 8)] {
        let mut tables = built.tables.clone().unwrap();
        tables.table[sequence * tables.width + block] = tables.table[3];
        let mut inputs = built.inputs();
        inputs.tables = Some(&tables);
        let message =
            format!("tables: token {token} of sequence {sequence} is not where prefixes[{index}] has it");
        let cpu = Cpu::new();
        let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
        assert_eq!(run(&cpu, &plan, &inputs).to_string(), message);
        let error = flashtile::reference::attention(&built.problem, &inputs).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    // The tokens after the prefix may differ.
    let mut tables = built.tables.clone().unwrap();
    tables.table[4] = 0;
    let mut inputs = built.inputs();
    inputs.tables = Some(&tables);
    flashtile::reference::attention(&built.problem, &inputs).unwrap();
}

#[test]
fn pools() {
    inputs_refused(
        &cached(),
        |inputs, spare| inputs.k = spare.f32.view().into(),
        "k has shape [2, 2, 9, 7], expected [2, 2, 4, 8]",
    );
    inputs_refused(
        &cached(),
        |inputs, spare| inputs.v = spare.f32.view().into(),
        "v has shape [2, 2, 9, 7], expected [11, 2, 4, 6]",
    );
    let built = build(&cached());
    let half = Guarded::new(Dtype::F16, [11, 2, 4, 8], Layout::Bhsd);
    let mut inputs = built.inputs();
    inputs.k = half.view().into();
    let error = flashtile::reference::attention(&built.problem, &inputs).unwrap_err();
    assert_eq!(error.to_string(), "k is f16, expected f32");
}

#[test]
fn trees() {
    let tree = || cached().tree(Tree::Causal);
    inputs_refused(&tree(), |inputs, _| inputs.tree = None, "tree is missing: the problem has it");
    inputs_refused(
        &cached(),
        |inputs, spare| inputs.tree = Some(MaskView::additive(spare.f32.view())),
        "tree was given but the problem does not have it",
    );
    inputs_refused(
        &tree(),
        |inputs, spare| inputs.tree = Some(MaskView::additive(spare.f16.view())),
        "tree is additive f16, expected bool",
    );
    inputs_refused(
        &tree(),
        |inputs, spare| inputs.tree = Some(MaskView::dense_bool(&spare.bools, [1, 1, 4, 4]).unwrap()),
        "tree has shape [1, 1, 4, 4], expected [1, 1, 4, 3]",
    );
    inputs_refused(
        &tree(),
        |inputs, spare| inputs.tree = Some(MaskView::dense_bool(&spare.bools, [1, 1, 1, 3]).unwrap()),
        "tree has shape [1, 1, 1, 3], expected [1, 1, 4, 3]",
    );
}

#[test]
fn outputs() {
    let built = build(&case());
    let cpu = Cpu::new();
    let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
    let refusal = |out: &mut Guarded, lse: Option<&mut [f32]>, workspace: &mut Workspace| {
        let mut outputs = Outputs::new(out.view_mut());
        outputs.lse = lse;
        cpu.run(&plan, &built.inputs(), &mut outputs, workspace).unwrap_err().to_string()
    };
    let out = |dtype, shape| Guarded::new(dtype, shape, Layout::Bhsd);
    assert_eq!(
        refusal(&mut out(Dtype::F32, [2, 4, 5, 8]), None, &mut plan.workspace()),
        "out has shape [2, 4, 5, 8], expected [2, 4, 5, 6]"
    );
    assert_eq!(
        refusal(&mut out(Dtype::BF16, [2, 4, 5, 6]), None, &mut plan.workspace()),
        "out is bf16, expected f32"
    );
    assert_eq!(
        refusal(&mut out(Dtype::F32, [2, 4, 5, 6]), Some(&mut [0.0; 41]), &mut plan.workspace()),
        "lse has 41 elements, expected 40"
    );
    let mut small = Workspace::new(plan.workspace_bytes() - 1 - 64);
    let got = small.len();
    assert_eq!(
        refusal(&mut out(Dtype::F32, [2, 4, 5, 6]), None, &mut small),
        format!("workspace has {got} bytes, the plan needs {}", plan.workspace_bytes())
    );
    let mut outputs = out(Dtype::F32, [2, 4, 5, 6]);
    cpu.run(&plan, &built.inputs(), &mut Outputs::new(outputs.view_mut()), &mut plan.workspace()).unwrap();
    assert_eq!(outputs.bits(), crate::support::answer(&built, &CpuRunner::new(cpu)).out.bits());
}
