//! The edges of the numbers: what validation accepts is computed, whatever its magnitude; what cannot be is refused.

use crate::support::{answer, build, quantizing};
use flashtile::cache::NO_PAGE;
use flashtile::testkit::{Built, Case, Keep, Runner};
use flashtile::{
    Codec, Cpu, Dtype, MergeError, Outputs, Part, PlanOptions, QOffset, TensorView, TensorViewMut, Visibility,
    Workspace, merge,
};
use std::time::{Duration, Instant};

/// The same tensors with tables that name pages beyond the pool wherever no kept token needs one.
fn with_junk_pages(built: &Built) -> Built {
    let mut junk = built.clone();
    let mut count = 0;
    if let Some(tables) = &mut junk.tables {
        for page in tables.table.iter_mut().filter(|page| **page == NO_PAGE) {
            *page = [NO_PAGE - 1, 1 << 20, 1 << 31][count % 3];
            count += 1;
        }
    }
    assert!(count > 0, "every entry is of a kept token");
    junk
}

#[test]
fn table_entries_that_no_kept_token_uses_may_hold_anything() {
    let stored = [
        (Codec::Int8, Codec::Int8),
        (Codec::Tq6, Codec::Tq5),
        (Codec::Fp8, Codec::Fp8),
        (Codec::F32, Codec::Tq3),
        (Codec::Int8, Codec::F32),
        (Codec::F32, Codec::F32),
    ];
    let window = Visibility::window(Some(99), Some(0));
    for (k, v) in stored {
        for (page, q_len, keep) in
            [(8, 1, Keep::Seen), (16, 1, Keep::Seen), (48, 3, Keep::Seen), (16, 20, Keep::Seen)]
        {
            let case = Case::new(format!("junk_{k}_{v}"), [1, 4, 2, 0, 0, 64, 64], Dtype::F32)
                .cached(&[(q_len, 300), (q_len, 900), (q_len, q_len), (q_len, 513)], page, keep)
                .seeing(window)
                .at(QOffset::BottomRight)
                .stored(k, v);
            let built = build(&case);
            let junk = with_junk_pages(&built);
            for runner in quantizing(1) {
                let same = answer(&built, &runner).bits() == answer(&junk, &runner).bits();
                assert!(same, "{} in pages of {page} on {}", case.name, runner.name());
            }
        }
    }
}

#[test]
fn merging_rows_without_elements_returns_at_once() {
    let begun = Instant::now();
    let long = 1usize << 31;
    let empty = |shape| TensorView::bhsd::<f32>(&[], shape).unwrap();
    for shape in [[long, long, 1, 0], [long, 1, long, 0], [1 << 40, 1 << 40, 0, 64], [1, 0, usize::MAX, 4]] {
        let mut memory = [0.0f32; 0];
        let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut memory, shape).unwrap());
        assert_eq!(merge(&[], &mut outputs), Ok(()), "{shape:?}");
        let parts = [Part { out: empty(shape), lse: &[] }];
        let merged = merge(&parts, &mut outputs);
        if shape.contains(&0) && shape[3] != 0 {
            assert_eq!(merged, Ok(()), "{shape:?}");
        } else {
            let expected = shape[0] * shape[1] * shape[2];
            assert_eq!(merged, Err(MergeError::Length { part: Some(0), expected, got: 0 }), "{shape:?}");
        }
    }
    // More rows than can be counted.
    let shape = [1 << 40, 1 << 40, 1, 0];
    let mut memory = [0.0f32; 0];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut memory, shape).unwrap());
    let refusal = merge(&[], &mut outputs).unwrap_err();
    assert_eq!(refusal, MergeError::TooLong { shape });
    assert_eq!(
        refusal.to_string(),
        "out of shape [1099511627776, 1099511627776, 1, 0] has more rows than can be counted"
    );
    assert!(begun.elapsed() < Duration::from_secs(1));
    // Rows without elements have logsumexps.
    let (mut memory, mut lse) = ([0.0f32; 0], [0.0f32; 2]);
    let shape = [1, 2, 1, 0];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut memory, shape).unwrap());
    outputs.lse = Some(&mut lse);
    let parts = [1.0, 2.0].map(|_| Part { out: empty(shape), lse: &[1.0, -2.0] });
    merge(&parts, &mut outputs).unwrap();
    assert_eq!(lse, [1.0 + 2f32.ln(), -2.0 + 2f32.ln()]);
}

#[test]
fn a_workspace_that_there_is_no_memory_for_is_refused() {
    for bytes in [usize::MAX, usize::MAX / 2, isize::MAX as usize - 63] {
        let refusal = Workspace::try_new(bytes).unwrap_err();
        assert_eq!(refusal.bytes, bytes);
        assert_eq!(refusal.to_string(), format!("no memory for {bytes} bytes of workspace"));
        assert_eq!(Workspace::new(bytes).len(), 0);
    }
    assert_eq!(Workspace::try_new(65).unwrap().len(), 128);
    assert!(Workspace::try_new(0).unwrap().is_empty());

    // A run without memory says how much it needs.
    let built = build(&Case::new("memory", [1, 1, 1, 2, 3, 4, 4], Dtype::F32));
    let cpu = Cpu::new();
    let plan = cpu.plan(&built.problem, PlanOptions::default()).unwrap();
    assert_eq!(plan.try_workspace().unwrap().len(), plan.workspace().len());
    let mut out = [0.0f32; 8];
    let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, [1, 1, 2, 4]).unwrap());
    let refusal = cpu.run(&plan, &built.inputs(), &mut outputs, &mut Workspace::new(usize::MAX)).unwrap_err();
    let needed = plan.workspace_bytes();
    assert_eq!(refusal.to_string(), format!("workspace has 0 bytes, the plan needs {needed}"));
}
