//! Any description is refused, or becomes a problem with consistent plans; nothing panics.

#![no_main]

use flashtile::plan::machines;
use flashtile::{
    CpuBackwardPlan, CpuPlan, Dims, Dtype, MaskKind, PlanOptions, Problem, ProblemDesc, QOffset, Sequences,
    Unsupported, Visibility,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

/// Batch entries and sequences cost memory, so their number stays small.
const MAX_SEQUENCES: usize = 300;
/// Planning lists every task, so only problems with few rows are planned.
const MAX_ROWS: usize = 1 << 20;

/// A size: mostly small, sometimes near a limit, sometimes arbitrary.
fn size(u: &mut Unstructured<'_>) -> Result<usize> {
    Ok(match u.int_in_range(0..=9)? {
        0..=5 => u.int_in_range(0..=20)?,
        6 => u.int_in_range(250..=520)?,
        7 => u.int_in_range(0..=100_000)?,
        8 => flashtile::problem::MAX_LEN.wrapping_add(u.int_in_range(0..=2)?).wrapping_sub(1),
        _ => u.arbitrary()?,
    })
}

fn sizes(u: &mut Unstructured<'_>) -> Result<Vec<usize>> {
    let count = u.int_in_range(0..=8)?;
    (0..count).map(|_| size(u)).collect()
}

/// Cumulative lengths, mostly well-formed.
fn cumulative(u: &mut Unstructured<'_>, count: usize) -> Result<Vec<usize>> {
    if u.ratio(1, 8)? {
        return sizes(u);
    }
    let mut list = vec![0usize];
    for _ in 0..count {
        let last = list[list.len() - 1];
        list.push(last.saturating_add(u.int_in_range(0..=300)?));
    }
    Ok(list)
}

fn optional<T>(
    u: &mut Unstructured<'_>,
    value: impl FnOnce(&mut Unstructured<'_>) -> Result<T>,
) -> Result<Option<T>> {
    if u.arbitrary()? { value(u).map(Some) } else { Ok(None) }
}

fn description(u: &mut Unstructured<'_>) -> Result<ProblemDesc> {
    let dtype = *u.choose(&[Dtype::F32, Dtype::F16, Dtype::BF16])?;
    let kv_heads = size(u)?;
    let q_heads = if u.ratio(7, 8)? { kv_heads.wrapping_mul(u.int_in_range(0..=9)?) } else { size(u)? };
    let dims = Dims {
        batch: size(u)?,
        q_heads,
        kv_heads,
        q_len: size(u)?,
        kv_len: size(u)?,
        head_dim: size(u)?,
        value_dim: size(u)?,
    };
    let mut desc = ProblemDesc::new(dims, dtype);
    desc.visibility = Visibility::window(optional(u, size)?, optional(u, size)?);
    if u.arbitrary()? {
        desc.visibility = desc.visibility.and(Visibility::causal());
    }
    desc.q_offset = optional(u, |u| {
        Ok(match u.int_in_range(0..=3)? {
            0 => QOffset::TopLeft,
            1 => QOffset::BottomRight,
            2 => QOffset::At(u.int_in_range(-600..=600)?),
            _ => QOffset::At(u.arbitrary()?),
        })
    })?;
    desc.scale = optional(u, |u| u.arbitrary())?;
    desc.softcap = optional(u, |u| u.arbitrary())?;
    desc.alibi = u.arbitrary()?;
    desc.sinks = u.arbitrary()?;
    desc.mask = optional(u, |u| Ok(if u.arbitrary()? { MaskKind::Bool } else { MaskKind::Additive(dtype) }))?;
    match u.int_in_range(0..=4)? {
        0 => {
            let mut kv_lens = sizes(u)?;
            if u.ratio(7, 8)? {
                kv_lens.iter_mut().for_each(|n| *n = (*n).min(dims.kv_len));
                desc.dims.batch = kv_lens.len();
            }
            desc.sequences = Sequences::Padded { kv_lens };
        }
        1 => {
            let count = u.int_in_range(0..=8)?;
            let (cu_seqlens_q, cu_seqlens_k) = (cumulative(u, count)?, cumulative(u, count)?);
            if u.ratio(7, 8)? {
                desc.dims.batch = 1;
                desc.dims.q_len = cu_seqlens_q.last().copied().unwrap_or(0);
                desc.dims.kv_len = cu_seqlens_k.last().copied().unwrap_or(0);
            }
            desc.sequences = Sequences::Packed { cu_seqlens_q, cu_seqlens_k };
        }
        2 => {
            let mut kv_lens = sizes(u)?;
            let cu_seqlens_q = cumulative(u, kv_lens.len())?;
            desc.tree = u.arbitrary()?;
            if u.ratio(7, 8)? {
                kv_lens.iter_mut().for_each(|n| *n = (*n).min(dims.kv_len));
                desc.dims.batch = 1;
                desc.dims.q_len = cu_seqlens_q.last().copied().unwrap_or(0);
            }
            desc.sequences = Sequences::Cached { cu_seqlens_q, kv_lens };
        }
        _ => {}
    }
    Ok(desc)
}

fn check(problem: &Problem, options: PlanOptions) {
    let dims = *problem.dims();
    assert!(problem.scale().is_finite());
    assert_eq!(dims.gqa_group() * dims.kv_heads, dims.q_heads);
    for s in problem.sequences() {
        assert!(s.q_start + s.q_len <= dims.q_len && s.kv_start + s.kv_len <= dims.kv_len);
        assert!(s.batch < dims.batch);
        for i in [0, s.q_len / 2, s.q_len.saturating_sub(1)].into_iter().filter(|&i| i < s.q_len) {
            let keys = problem.visible(s, i);
            assert!(keys.start <= keys.end && keys.end <= s.kv_len);
            let first = problem.first_visible(s).map_or(usize::MAX, |(_, key)| key);
            assert!(keys.is_empty() || first <= keys.start);
        }
    }
    let rows = problem.sequences().iter().try_fold(0usize, |n, s| n.checked_add(s.q_len));
    let rows = rows.and_then(|n| n.checked_mul(dims.q_heads));
    if rows.is_none_or(|n| n > MAX_ROWS) {
        return;
    }
    assert!(problem.flops() >= 0.0);
    for (_, facts) in machines::ALL {
        match CpuPlan::new(problem, &facts, options) {
            Ok(plan) => {
                assert_eq!(plan.problem(), problem);
                assert_eq!(Ok(&plan), CpuPlan::new(problem, &facts, options).as_ref(), "planning is pure");
                assert!(plan.splits() >= 1 && plan.threads() <= facts.threads && plan.block_k() > 0);
                assert!(options.splits.is_none_or(|splits| splits == plan.splits()));
                assert!(plan.to_string().starts_with(&plan.kernel()));
            }
            Err(Unsupported::Splits { got, max }) => {
                assert_eq!(options.splits, Some(got));
                assert!(got == 0 || got > max);
            }
            Err(Unsupported::Workspace { .. } | Unsupported::Tasks { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        match CpuBackwardPlan::new(problem, &facts, options) {
            Ok(plan) => {
                assert!(problem.no_gradients().is_none() && problem.backward_flops() >= 0.0);
                assert_eq!(
                    Ok(&plan),
                    CpuBackwardPlan::new(problem, &facts, options).as_ref(),
                    "planning is pure"
                );
                assert!(plan.workers() <= facts.threads && plan.to_string().starts_with(&plan.kernel()));
            }
            Err(Unsupported::Backward { .. }) => assert!(problem.no_gradients().is_some()),
            Err(Unsupported::Splits { got, .. }) => assert_eq!((options.splits, got), (Some(0), 0)),
            Err(Unsupported::Workspace { .. } | Unsupported::Tasks { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let Ok(desc) = description(&mut u) else { return };
    if matches!(desc.sequences, Sequences::Dense) && desc.dims.batch > MAX_SEQUENCES {
        return;
    }
    let mut options = PlanOptions::default();
    options.skip_tiles = u.arbitrary().unwrap_or(true);
    options.splits = u.arbitrary::<Option<u8>>().unwrap_or(None).map(usize::from);
    match desc.validate() {
        Ok(problem) => check(&problem, options),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
